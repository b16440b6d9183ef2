#include "launcher/bench/bench_local.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <annulus/ring/block_scores.hpp>

namespace annulus::launcher {
namespace {

// Calls repeat(begin, count) until pieces of at most `period` tokens, the shard's, fill `length`. A
// shard without tokens leaves the memory as it is.
template <class Repeat>
void for_repeats(std::int64_t period, std::int64_t length, const Repeat& repeat) {
  for (std::int64_t begin = 0; period > 0 && begin < length; begin += period) {
    repeat(begin, std::min(period, length - begin));
  }
}

// The entries of `shard` along a dimension, repeated until there are `length`.
Tensor repeated(const ConstTensorView& shard, int dim, std::int64_t length, Device& device,
                Stream& stream) {
  Extents shape = shard.shape();
  shape[dim] = length;
  Tensor result(shard.dtype(), shape, device.memory());
  for_repeats(shard.size(dim), length, [&](std::int64_t begin, std::int64_t count) {
    device.copy(shard.slice(dim, 0, count), result.view().slice(dim, begin, count), stream);
  });
  return result;
}

// The part of a tensor [b,t,n,d] or [b,n,t] with a tile's batches, these heads, and `count` tokens
// from `begin` on.
TensorView part_of(const Tensor& tensor, const ring::Tile& tile, std::int64_t begin,
                   std::int64_t count, const ring::HeadRange& heads) {
  const bool has_width = tensor.shape().rank() == 4;
  return tensor.view()
      .slice(0, tile.batches.begin, tile.batches.count)
      .slice(has_width ? 1 : 2, begin, count)
      .slice(has_width ? 2 : 1, heads.begin, heads.count);
}

TensorView rows_of(const Tensor& tensor, const ring::Tile& tile) {
  return part_of(tensor, tile, tile.rows.begin.value(), tile.rows.count, tile.heads);
}

TensorView columns_of(const Tensor& tensor, const ring::Tile& tile, const ring::RankPlan& plan) {
  return part_of(tensor, tile, 0, tile.columns.count, plan.kv_heads_of(tile.heads));
}

}  // namespace

LocalBlocks::LocalBlocks(const AttentionProblem& problem, const ring::RankPlan& plan,
                         const Operands& shards, Context& context)
    : problem_(problem),
      plan_(plan),
      shards_(shards),
      device_(context.device()),
      threads_(context.threads()),
      stream_(device_.make_stream("local", context.mesh().watchdog(), nullptr)) {
  std::int64_t longest = 0;
  std::int64_t rows = plan.local.query_length;
  for (const ring::Tile* tile : plan.tiles()) {
    longest = std::max(longest, tile->columns.count);
    rows = std::max(rows, tile->rows.end().value());
  }
  query_ = repeated(shards.query, 1, rows, device_, *stream_);
  key_ = repeated(shards.key, 1, longest, device_, *stream_);
  value_ = repeated(shards.value, 1, longest, device_, *stream_);
}

LocalBlocks::LocalBlocks(const AttentionProblem& problem, const Attention& attention,
                         const ring::LocalTensors& shards, Context& context)
    : LocalBlocks(problem, attention.rank_plan(),
                  {shards.query, shards.key, shards.value, shards.bias, shards.mask}, context) {
  Extents output_shape = query_.shape();
  output_shape[3] = shards.output.size(3);
  lse_ =
      Tensor(DType::float32, {output_shape[0], output_shape[2], output_shape[1]}, device_.memory());
  for (const ring::Block* block : plan_.all<ring::Block>()) {
    const auto state_of = [&](const ring::Result& result) -> SoftmaxState {
      const DType dtype = plan_.buffer(result.output.buffer).dtype;
      Tensor& output = outputs_[dtype];
      if (output.shape().rank() == 0) {
        output = Tensor(dtype, output_shape, device_.memory());
      }
      return {rows_of(output, *block), rows_of(lse_, *block)};
    };
    AttentionBlock operands = operands_of(*block);
    const SoftmaxState result = state_of(block->result);
    if (block->state) operands.state = state_of(*block->state);
    Kernel& kernel = kernel_of(attention.implementation_of(*block));
    kernel.prepare(operands, result);
    calls_.emplace_back([&kernel, operands, result](const ExecutionContext& on) {
      kernel.forward(operands, result, on);
    });
  }
}

LocalBlocks::LocalBlocks(const AttentionProblem& problem, const ring::ShardedAttention& pass,
                         const ring::BackwardLocalTensors& shards, Context& context)
    : LocalBlocks(problem, pass.rank_plan(),
                  {shards.query, shards.key, shards.value, shards.bias, shards.mask}, context) {
  const std::int64_t rows = query_.shape()[1];
  grad_output_ = repeated(shards.grad_output, 1, rows, device_, *stream_);
  lse_ = repeated(shards.lse, 2, rows, device_, *stream_);
  grad_query_ = sums_like(query_);
  grad_key_ = sums_like(key_);
  grad_value_ = sums_like(value_);
  for (const ring::BackwardBlock* tile : plan_.all<ring::BackwardBlock>()) {
    const AttentionBlock operands = operands_of(*tile);
    // Any finite numbers serve as delta, so the LSE is used.
    const BackwardBlock block{
        operands.query,       operands.key,         operands.value,    rows_of(grad_output_, *tile),
        rows_of(lse_, *tile), rows_of(lse_, *tile), operands.rows,     operands.columns,
        operands.first_batch, operands.first_head,  operands.unmasked, operands.scores};
    const Gradients gradients{rows_of(grad_query_, *tile), columns_of(grad_key_, *tile, plan_),
                              columns_of(grad_value_, *tile, plan_)};
    Kernel& kernel = kernel_of(pass.implementation_of(*tile));
    kernel.prepare_backward(block, gradients);
    calls_.emplace_back([&kernel, block, gradients](const ExecutionContext& on) {
      kernel.backward(block, gradients, on);
    });
  }
}

Tensor LocalBlocks::sums_like(const Tensor& tensor) const {
  Tensor sums(partial_dtype(problem_.dtype), tensor.shape(), device_.memory());
  // On CPUs, uninitialised numbers may be subnormal, which is slow.
  if (device_.place().is_host()) sums.fill_zero();
  return sums;
}

Kernel& LocalBlocks::kernel_of(const Implementation& implementation) {
  std::unique_ptr<Kernel>& kernel = kernels_[&implementation];
  if (!kernel) kernel = implementation.make_kernel(problem_, device_);
  return *kernel;
}

AttentionBlock LocalBlocks::operands_of(const ring::Tile& tile) {
  const auto scores_of = [&](const ring::Region& region) {
    const ring::Buffer& buffer = plan_.buffer(region.buffer);
    const bool biases = buffer.contents.front() == ring::Content::bias;
    const ConstTensorView own = biases ? shards_.bias : shards_.mask;
    const ConstTensorView held =
        buffer.kind == ring::BufferKind::caller ? own : rows_of_others(region.buffer, own).view();
    return held.slice(0, region.batches.begin, region.batches.count)
        .slice(1, region.heads.begin - buffer.heads.begin, region.heads.count)
        .slice(2, region.tokens.begin - buffer.tokens.begin, region.tokens.count);
  };
  return {rows_of(query_, tile),
          columns_of(key_, tile, plan_),
          columns_of(value_, tile, plan_),
          tile.row_positions,
          tile.column_positions,
          plan_.first_batch + tile.batches.begin,
          plan_.first_head + tile.heads.begin,
          tile.full,
          {},
          ring::block_scores(plan_, tile, problem_.shape.kv_length, scores_of)};
}

// The rank's own rows, cut to the heads and keys of the buffer and repeated.
const Tensor& LocalBlocks::rows_of_others(int buffer, const ConstTensorView& own) {
  const auto [entry, added] = scores_.try_emplace(buffer);
  Tensor& rows = entry->second;
  if (!added) return rows;
  const ring::Buffer& held = plan_.buffer(buffer);
  rows = Tensor(held.dtype,
                {plan_.batches(held).count, held.heads.count, held.tokens.count,
                 plan_.width(held, held.contents.front())},
                device_.memory());
  const ConstTensorView heads = own.slice(1, held.heads.begin, held.heads.count);
  std::vector<TensorCopy> copies;
  for_repeats(own.size(2), held.tokens.count, [&](std::int64_t begin, std::int64_t count) {
    const ConstTensorView from = heads.slice(2, 0, count);
    const TensorView to = rows.view().slice(2, begin, count);
    if (held.columns) {
      ring::add_key_copies(from, *held.columns, to, copies);
    } else {
      copies.push_back({from, to});
    }
  });
  device_.copy(copies, *stream_);
  return rows;
}

void LocalBlocks::run() {
  if (warm_ && !recording_) recording_ = device_.record(*stream_, [this] { submit(); });
  if (recording_) {
    recording_->submit(*stream_);
  } else {
    submit();
  }
  warm_ = true;
  stream_->synchronize();
}

void LocalBlocks::submit() {
  for (const auto& call : calls_) call({*stream_, stream_.get(), threads_});
}

}  // namespace annulus::launcher
