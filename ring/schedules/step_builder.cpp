#include "schedules/step_builder.hpp"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include <annulus/attention/local_mask.hpp>

namespace annulus::ring {
namespace {

// First global position of a dimension of a shard; 0 for an empty one.
std::int64_t first_of(const NamedSharding& sharding, int rank, int dim) {
  const PositionRanges positions = sharding.positions(rank, dim);
  return positions.empty() ? 0 : positions.global(LocalPosition(0)).value();
}

bool overlap(const LocalRange& a, const LocalRange& b) {
  return a.begin < b.end() && b.begin < a.end();
}

bool overlap(const HeadRange& a, const HeadRange& b) {
  return a.begin < b.begin + b.count && b.begin < a.begin + a.count;
}

}  // namespace

LocalRange hull(const LocalRange& a, const LocalRange& b) {
  if (a.count == 0) return b;
  if (b.count == 0) return a;
  const LocalPosition begin = std::min(a.begin, b.begin);
  return {begin, std::max(a.end(), b.end()) - begin};
}

StepBuilder::StepBuilder(const RankContext& context)
    : context_(context), rows_(context.operands.query.positions(context.rank, 1)) {
  const Extents query = context.operands.query.local_shape(context.rank);
  const Extents key = context.operands.key.local_shape(context.rank);
  plan_.rank = context.rank;
  plan_.group_rank = context.group_rank;
  plan_.local = {
      query[0], query[1], key[1], query[2], key[2], query[3], context.problem.shape.value_dim};
  plan_.first_batch = first_of(context.operands.query, context.rank, 0);
  plan_.first_head = first_of(context.operands.query, context.rank, 2);
  add_buffer({BufferKind::input, key[1], {0, key[2]}, {LocalPosition(0), key[1]}, -1});
}

int StepBuilder::add_buffer(const KvBuffer& buffer) {
  plan_.buffers.push_back(buffer);
  return static_cast<int>(plan_.buffers.size()) - 1;
}

int StepBuilder::add_packed(LocalRange columns, HeadRange kv_heads) {
  return add_buffer({BufferKind::packed, columns.count, kv_heads, columns, -1});
}

Step& StepBuilder::step(std::size_t index) {
  if (plan_.steps.size() <= index) plan_.steps.resize(index + 1);
  return plan_.steps[index];
}

std::vector<PlacedPiece> StepBuilder::own_columns() const {
  std::vector<PlacedPiece> placed;
  std::int64_t slot = 0;
  const PositionRanges columns = context_.operands.key.positions(context_.rank, 1);
  for (const PositionRange& chunk : columns.ranges()) {
    placed.push_back({{{LocalPosition(slot), chunk.length}, chunk}, slot});
    slot += chunk.length;
  }
  return placed;
}

void StepBuilder::add_block(std::size_t index, int buffer, HeadRange kv_heads,
                            const std::vector<PlacedPiece>& columns) {
  Block frame;
  frame.buffer = buffer;
  const std::int64_t ratio = plan_.local.heads_per_kv_head();
  frame.heads = {kv_heads.begin * ratio, kv_heads.count * ratio};
  add_blocks(step(index), frame, {LocalPosition(0), rows_.size()}, columns);
}

void StepBuilder::add_blocks(Step& step, const Block& frame, LocalRange rows,
                             const std::vector<PlacedPiece>& columns) {
  Block block = hull_of(rows, columns);
  if (block.pairs == 0) return;
  if (context_.straight_blocks && !is_straight(block)) {
    const std::vector<LocalRange> parts = cut(rows);
    if (parts.size() > 1) {
      for (const LocalRange& part : parts) add_blocks(step, frame, part, columns);
      return;
    }
  }
  block.buffer = frame.buffer;
  block.heads = frame.heads;
  for (const Step& earlier : plan_.steps) {
    for (const Block& other : earlier.blocks) {
      block.merge =
          block.merge || (overlap(block.rows, other.rows) && overlap(block.heads, other.heads));
    }
  }
  step.blocks.push_back(std::move(block));
}

Block StepBuilder::hull_of(LocalRange rows, const std::vector<PlacedPiece>& columns) const {
  Block block;
  bool exact = true;
  for (const PlacedPiece& placed : columns) {
    std::int64_t first_row = rows.begin.value();
    const PositionRanges row_positions = rows_.slice(rows);
    for (const PositionRange& range : row_positions.ranges()) {
      const Visibility seen = context_.problem.mask.examine(plan_.first_batch, plan_.local.batch,
                                                            range, placed.piece.positions);
      if (!seen.empty()) {
        block.pairs += seen.pairs;
        exact = exact && seen.exact;
        block.rows = hull(block.rows, {seen.rows.begin + first_row, seen.rows.count});
        block.slots = hull(block.slots, {seen.columns.begin + placed.slot, seen.columns.count});
      }
      first_row += range.length;
    }
  }
  if (block.pairs == 0) return block;

  std::vector<PositionRange> positions;
  for (const PlacedPiece& placed : columns) {
    const std::int64_t begin = std::max(block.slots.begin.value() - placed.slot, std::int64_t{0});
    const std::int64_t end =
        std::min(block.slots.end().value() - placed.slot, placed.piece.positions.length);
    if (begin < end) positions.push_back(placed.piece.positions.slice(begin, end - begin));
  }
  block.column_positions = PositionRanges(std::move(positions));
  block.row_positions = rows_.slice(block.rows);
  block.full = exact && block.pairs == block.rows.count * block.slots.count * plan_.local.batch;
  return block;
}

bool StepBuilder::is_straight(const Block& block) const {
  return block.full || local_mask(context_.problem.mask, plan_.first_batch, plan_.local.batch,
                                  block.row_positions, block.column_positions)
                           .obstacle.empty();
}

std::vector<LocalRange> StepBuilder::cut(LocalRange rows) const {
  const PositionRanges positions = rows_.slice(rows);
  std::vector<LocalRange> parts;
  LocalPosition begin = rows.begin;
  if (positions.ranges().size() > 1) {
    for (const PositionRange& range : positions.ranges()) {
      parts.push_back({begin, range.length});
      begin = begin + range.length;
    }
    return parts;
  }
  const Mask& mask = context_.problem.mask;
  if (!mask.has_segments()) return {rows};
  const auto id_of = [&](std::int64_t batch, LocalPosition row) {
    return mask.query_segments(plan_.first_batch +
                               batch)[static_cast<std::size_t>(rows_.global(row).value())];
  };
  for (LocalPosition row = begin + 1;; row = row + 1) {
    // Batches with documents of their own could only be cut one by one.
    for (std::int64_t batch = 1; batch < plan_.local.batch; ++batch) {
      if (id_of(batch, row - 1) != id_of(0, row - 1)) return {rows};
    }
    if (row < rows.end() && id_of(0, row) == id_of(0, begin)) continue;
    parts.push_back({begin, row - begin});
    if (row == rows.end()) break;
    begin = row;
  }
  // Calls for many short documents would cost more than one kernel that knows the mask.
  constexpr std::size_t kMostDocuments = 64;
  return parts.size() > kMostDocuments ? std::vector<LocalRange>{rows} : parts;
}

void StepBuilder::add_transfer(std::vector<Transfer>& transfers, int peer, int origin, int buffer,
                               LocalRange slots) const {
  const std::int64_t bytes =
      slots.count *
      plan_.slot_bytes(plan_.buffers[static_cast<std::size_t>(buffer)], context_.problem.dtype);
  transfers.push_back({Payload::key_value, peer, origin, buffer, slots, bytes});
}

void StepBuilder::add_send(std::size_t index, int peer, int origin, int buffer, LocalRange slots) {
  add_transfer(step(index).sends, peer, origin, buffer, slots);
}

void StepBuilder::add_receive(std::size_t index, int peer, int origin, int buffer,
                              LocalRange slots) {
  add_transfer(step(index).receives, peer, origin, buffer, slots);
}

RankPlan StepBuilder::finish() {
  while (!plan_.steps.empty() && plan_.steps.back().blocks.empty() &&
         plan_.steps.back().sends.empty() && plan_.steps.back().receives.empty()) {
    plan_.steps.pop_back();
  }
  return std::move(plan_);
}

}  // namespace annulus::ring
