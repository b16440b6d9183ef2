#include "schedules/building/global_order.hpp"

#include <algorithm>
#include <cstdint>

#include <fmt/format.h>

namespace annulus::ring {
namespace {

bool is_all(const PositionRanges& positions, std::int64_t length) {
  if (positions.ranges().size() != 1) return false;
  const PositionRange& range = positions.ranges().front();
  return range.length == length && range.start == GlobalPosition(0) &&
         (range.stride == 1 || length == 1);
}

// True if no tile is cut, other than at the end of the sequence.
bool are_whole_tiles(const PositionRanges& positions, std::int64_t length, std::int64_t tile) {
  return std::ranges::all_of(positions.ranges(), [&](const PositionRange& range) {
    const std::int64_t begin = range.start.value();
    const std::int64_t end = begin + range.length;
    return (range.stride == 1 || range.length <= 1) && begin % tile == 0 &&
           (end % tile == 0 || end == length);
  });
}

// Rows against all columns: results, or gradients of queries.
std::string rows_obstacle(const Declaration& kernel, const AttentionShape& shape,
                          const Tile& block) {
  if (!is_all(block.column_positions, shape.kv_length)) {
    return fmt::format("its columns {} are not all {} in order", to_string(block.column_positions),
                       shape.kv_length);
  }
  if (!are_whole_tiles(block.row_positions, shape.query_length, kernel.reproducible_rows)) {
    return fmt::format("its rows {} are not cut at multiples of {} only",
                       to_string(block.row_positions), kernel.reproducible_rows);
  }
  return {};
}

// The gradients of keys are sums over rows and over the query heads of their group.
std::string columns_obstacle(const Declaration& kernel, const PlanInput& input,
                             const RankPlan& plan, const Tile& block) {
  const AttentionShape& shape = input.problem.shape;
  if (!is_all(block.row_positions, shape.query_length)) {
    return fmt::format("the gradients of keys are added up over rows, of which it has {}",
                       to_string(block.row_positions));
  }
  const std::int64_t group = shape.heads_per_kv_head();
  const std::int64_t first = plan.first_head + block.heads.begin;
  if (first % group != 0 || block.heads.count % group != 0) {
    return fmt::format(
        "the gradients of keys are added up over the {} query heads of a group, of which it has "
        "heads {}:{}",
        group, first, first + block.heads.count);
  }
  const std::int64_t tile = kernel.backward->reproducible_columns;
  if (!are_whole_tiles(block.column_positions, shape.kv_length, tile)) {
    return fmt::format("its columns {} are not cut at multiples of {} only",
                       to_string(block.column_positions), tile);
  }
  return {};
}

// Sums of the bias's gradient over ranks.
std::string bias_obstacle(const PlanInput& input, const Tile& block) {
  if (!input.backward->grad_bias) return {};
  const Extents& bias = *input.problem.bias;
  const AttentionShape& shape = input.problem.shape;
  if (bias[0] == 1 && block.batches.count < shape.batch) {
    return "the gradient of a bias that all batches share is added up over ranks";
  }
  if (bias[1] == 1 && block.heads.count < shape.heads) {
    return "the gradient of a bias that all heads share is added up over ranks";
  }
  if (bias[2] == 1 && !is_all(block.row_positions, shape.query_length)) {
    return "the gradient of a bias that all rows share is added up over ranks";
  }
  return {};
}

std::string obstacle(const Declaration& kernel, const PlanInput& input, const RankPlan& plan,
                     const Tile& block) {
  std::string reason;
  if (block.gradients.rows) reason = rows_obstacle(kernel, input.problem.shape, block);
  if (!input.backward || !reason.empty()) return reason;
  if (block.gradients.rows) reason = bias_obstacle(input, block);
  if (block.gradients.columns && reason.empty()) {
    reason = columns_obstacle(kernel, input, plan, block);
  }
  return reason;
}

}  // namespace

std::string order_obstacle(const Declaration& kernel, const PlanInput& input, const RankPlan& plan,
                           const Tile& block) {
  const std::string reason = obstacle(kernel, input, plan, block);
  return reason.empty() ? "" : "reproducible world: " + reason;
}

}  // namespace annulus::ring
