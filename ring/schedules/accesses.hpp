#pragma once

#include <cstdint>
#include <variant>

#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// How a task uses a region of a buffer.
enum class Use : std::uint8_t {
  read,
  awaited,  ///< read, but the kernel itself waits for it: see Block::awaits_columns
  write,
  add  ///< read and write
};

/// True if two ranges of tokens, heads or batches have a common entry.
template <class Range>
bool overlap(const Range& a, const Range& b) {
  return a.begin < b.end() && b.begin < a.end();
}

namespace accesses {

template <class Body>
void each_region(const Result& result, Use use, const Body& body) {
  body(result.output, use);
  for (const int buffer : {result.lse, result.maximum}) {
    if (buffer >= 0) body(result.output.in(buffer), use);
  }
}

template <class Body>
void each_operand(const RankPlan& plan, const Tile& tile, Use columns, const Body& body) {
  const HeadRange kv_heads = plan.kv_heads_of(tile.heads);
  body(Region{tile.query, tile.rows, tile.heads, tile.batches}, Use::read);
  body(Region{tile.key, tile.columns, kv_heads, tile.batches}, columns);
  if (tile.value != tile.key) {
    body(Region{tile.value, tile.columns, kv_heads, tile.batches}, columns);
  }
  for (const int scores : {tile.bias, tile.dense_mask}) {
    if (scores >= 0) body(plan.scores_of(tile, scores), Use::read);
  }
}

template <class Body>
void each(const RankPlan& /*plan*/, const Copy& copy, const Body& body) {
  body(copy.source(), Use::read);
  body(copy.to, Use::write);
}

template <class Body>
void each(const RankPlan& plan, const Exchange& exchange, const Body& body) {
  const auto all_heads = [&](const Transfer& transfer) {
    return plan.whole(transfer.buffer).at(transfer.tokens);
  };
  for (const Transfer& send : exchange.sends) body(all_heads(send), Use::read);
  for (const Transfer& receive : exchange.receives) body(all_heads(receive), Use::write);
}

template <class Body>
void each(const RankPlan& plan, const Block& block, const Body& body) {
  each_operand(plan, block, block.awaits_columns ? Use::awaited : Use::read, body);
  if (block.state) each_region(*block.state, Use::read, body);
  each_region(block.result, Use::write, body);
}

template <class Body>
void each(const RankPlan& /*plan*/, const Reduce& reduce, const Body& body) {
  for (const Result& part : reduce.parts) each_region(part, Use::read, body);
  each_region(reduce.into, Use::write, body);
}

template <class Body>
void each(const RankPlan& /*plan*/, const Delta& delta, const Body& body) {
  body(delta.output, Use::read);
  body(delta.output.in(delta.grad_output), Use::read);
  if (delta.grad_lse >= 0) body(delta.output.in(delta.grad_lse), Use::read);
  body(delta.output.in(delta.delta), Use::write);
}

template <class Body>
void each(const RankPlan& plan, const SinkGradient& gradient, const Body& body) {
  body(gradient.delta, Use::read);
  body(gradient.delta.in(gradient.lse), Use::read);
  body(plan.whole(gradient.grad_sinks), Use::write);
}

template <class Body>
void each(const RankPlan& plan, const BackwardBlock& block, const Body& body) {
  each_operand(plan, block, Use::read, body);
  for (const int buffer : {block.grad_output, block.lse, block.delta}) {
    body(Region{buffer, block.rows, block.heads, block.batches}, Use::read);
  }
  for (const Region* gradient :
       {&block.grad_query, &block.grad_key, &block.grad_value, &block.grad_bias}) {
    if (gradient->buffer >= 0) body(*gradient, Use::add);
  }
}

}  // namespace accesses

/// Calls body(region, use) for all that a task reads and writes; for an exchange, all that it sends
/// and receives. Dependencies and tests are derived from this function alone.
template <class Body>
void each_access(const RankPlan& plan, const Task& task, const Body& body) {
  std::visit([&](const auto& work) { accesses::each(plan, work, body); }, task.work);
}

}  // namespace annulus::ring
