#include "schedules/building/block_finder.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

#include "cost/cost.hpp"
#include "schedules/building/global_order.hpp"
#include "schedules/building/refusals.hpp"

namespace annulus::ring {
namespace {

// More calls for short documents than this cost more than one kernel that knows the mask, if only
// because each length needs a kernel plan of its own.
constexpr std::size_t kMaximumDocuments = 64;

// The factor on the preferred candidate's time, so small that the candidate always wins.
constexpr double kPreference = 1e-9;

bool is_preferred(const PlanInput& input, const Implementation& candidate) {
  return candidate.names().front() == input.options.preferred;
}

// Why the gradient of a bias of this shape [B,N,T,S] cannot be added up in the block.
std::string bias_obstacle(const BackwardDeclaration& backward, const Extents& bias,
                          const Tile& block, bool repeats) {
  const auto is_shared = [&](int dim, std::int64_t count) { return bias[dim] == 1 && count > 1; };
  if (!backward.sums_bias_over_keys && is_shared(3, block.columns.count)) {
    return "the bias's gradient is a sum over keys";
  }
  if (repeats && !backward.repeats_bias_sums &&
      (is_shared(0, block.batches.count) || is_shared(1, block.heads.count) ||
       is_shared(2, block.rows.count))) {
    return "the bias's gradient is a sum over batches, heads or rows, which are added in a varying "
           "order";
  }
  return {};
}

}  // namespace

std::vector<PlacedPiece> side_by_side(const PositionRanges& columns) {
  std::vector<PlacedPiece> placed;
  std::int64_t token = 0;
  for (const PositionRange& range : columns.ranges()) {
    placed.push_back({{{LocalPosition(token), range.length}, range}, token});
    token += range.length;
  }
  return placed;
}

std::string obstacle_of(const Implementation& candidate, const PlanInput& input,
                        const RankPlan& plan, const Tile& block) {
  const BatchRange batches = plan.global(block.batches);
  const bool repeats = input.problem.repeats_bits({input.prices.model.device, 0});
  const BlockGeometry geometry{block.row_positions, block.column_positions,
                               batches.begin,       batches.count,
                               block.full,          input.backward.has_value() && repeats};
  const Capability can = input.backward ? candidate.takes_backward(input.problem, geometry)
                                        : candidate.takes(input.problem, geometry);
  if (!can) return can.reason();
  if (input.backward) {
    if (const auto& backward = candidate.declares().backward) {
      if (repeats && !backward->repeats_bits) {
        return "the bits of its gradients vary from run to run";
      }
      if (input.backward->grad_lse && !backward->takes_grad_lse) {
        return "it takes no gradient of the LSE";
      }
      if (input.backward->grad_bias && input.problem.bias) {
        std::string reason = bias_obstacle(*backward, *input.problem.bias, block, repeats);
        if (!reason.empty()) return reason;
      }
    }
  } else if (input.candidates.size() > 1 && !candidate.repeats_bits(geometry)) {
    return "its bits vary from run to run, so it computes this only where it is named";
  }
  if (input.problem.in_global_order()) {
    std::string reason = order_obstacle(candidate.declares(), input, plan, block);
    if (!reason.empty()) return reason;
  }
  return refusal_of(candidate, input, plan, block, false);
}

std::string refusal_of(const Implementation& candidate, const PlanInput& input,
                       const RankPlan& plan, const Tile& block, bool rounding) {
  if (input.refusals.empty()) return {};
  const Refusal asked = class_of(input.problem, {candidate.names().front(),
                                                 block.row_positions,
                                                 block.column_positions,
                                                 plan.global(block.batches),
                                                 block.heads.count,
                                                 block.full,
                                                 {},
                                                 rounding});
  const auto found =
      std::find_if(input.refusals.begin(), input.refusals.end(),
                   [&](const Refusal& refusal) { return refusal.is_of_the_class_of(asked); });
  return found == input.refusals.end() ? std::string() : found->reason;
}

BlockFinder::BlockFinder(const RankContext& context, const RankPlan& plan, PositionRanges rows)
    : context_(context), plan_(plan), rows_(std::move(rows)) {}

std::vector<Block> BlockFinder::find(HeadRange heads, const std::vector<PlacedPiece>& columns,
                                     GradientSides gradients) const {
  Priced found = solve(heads, whole(columns), {.gradients = gradients});
  if (!found.obstacle.empty()) throw UnsupportedError(found.obstacle);
  return std::move(found.blocks);
}

std::vector<Block> BlockFinder::find_awaiting(HeadRange heads,
                                              const std::vector<PlacedPiece>& columns) const {
  Priced found = solve(heads, whole(columns), {.awaiting = true});
  return found.obstacle.empty() ? std::move(found.blocks) : find(heads, columns);
}

bool BlockFinder::awaits_columns(const Block& block) const {
  return context_.input.candidates[static_cast<std::size_t>(block.implementation)]->awaits_columns(
      context_.input.problem);
}

BlockFinder::Tile BlockFinder::whole(const std::vector<PlacedPiece>& columns) const {
  return {{LocalPosition(0), rows_.size()}, {0, plan_.local.batch}, columns};
}

BlockFinder::Priced BlockFinder::solve(HeadRange heads, const Tile& tile,
                                       const Asked& asked) const {
  Block block = hull_of(tile);
  if (block.pairs == 0) return {};
  block.heads = heads;
  block.gradients = asked.gradients;
  bool worth_cutting = false;
  Priced whole = price(std::move(block), asked, worth_cutting);
  if (!worth_cutting) return whole;

  Priced parts;
  const std::vector<Tile> tiles = cut(tile);
  for (const Tile& part : tiles) {
    Priced solved = solve(heads, part, asked);
    if (!solved.obstacle.empty()) return whole;
    parts.seconds += solved.seconds;
    std::move(solved.blocks.begin(), solved.blocks.end(), std::back_inserter(parts.blocks));
  }
  const bool better = whole.blocks.empty() || parts.seconds < whole.seconds;
  return !tiles.empty() && better ? std::move(parts) : std::move(whole);
}

// The fastest candidate that takes the block, the first of equals. Cutting may be worth it if a
// candidate that takes only simpler blocks would be faster still.
BlockFinder::Priced BlockFinder::price(Block block, const Asked& asked, bool& worth_cutting) const {
  Priced best;
  int chosen = -1;
  std::string reasons;
  double fastest_refused = std::numeric_limits<double>::infinity();
  const auto& candidates = context_.input.candidates;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    block.implementation = static_cast<int>(i);
    const bool preferred = is_preferred(context_.input, *candidates[i]);
    if (asked.awaiting) {
      const bool passed_over = !preferred && !context_.input.options.preferred.empty();
      if (passed_over || !awaits_columns(block)) continue;
    }
    block.awaits_columns = asked.awaiting;
    const double seconds = seconds_with_handover(block) * (preferred ? kPreference : 1);
    const std::string reason = obstacle_of(*candidates[i], context_.input, plan_, block);
    if (reason.empty()) {
      if (chosen < 0 || seconds < best.seconds) {
        chosen = block.implementation;
        best.seconds = seconds;
      }
      continue;
    }
    reasons += fmt::format("; {}: {}", candidates[i]->names().front(), reason);
    const Declaration& declares = candidates[i]->declares();
    const bool backward = context_.input.backward && declares.backward;
    if ((backward ? declares.backward->blocks : declares.blocks) == BlockForm::straight) {
      fastest_refused = std::min(fastest_refused, seconds);
    }
  }
  if (chosen < 0) {
    best.obstacle =
        fmt::format("no implementation can compute rows {} against columns {}{}",
                    to_string(block.row_positions), to_string(block.column_positions), reasons);
  }
  worth_cutting = std::isfinite(fastest_refused) && (chosen < 0 || fastest_refused < best.seconds);
  if (chosen >= 0) {
    block.implementation = chosen;
    best.blocks.push_back(std::move(block));
  }
  return best;
}

// In a sharded sequence, handing over partial results costs time as well. Gradients are always
// added in place.
double BlockFinder::seconds_with_handover(const Block& block) const {
  const PlanInput& input = context_.input;
  if (input.backward) return seconds_of_gradients(plan_, block, input.prices);
  const double seconds = seconds_of(plan_, block, input.prices);
  if (context_.group.size() == 1) return seconds;
  const Declaration& kernel =
      input.candidates[static_cast<std::size_t>(block.implementation)]->declares();
  const DType dtype = kernel.results == ResultForm::rounded ? input.problem.dtype
                                                            : partial_dtype(input.problem.dtype);
  return seconds + input.prices.model.memory_seconds(
                       (kernel.continues_state ? kPassesToContinue : kPassesToCombine) *
                       static_cast<double>(size_of(dtype)) *
                       static_cast<double>(block.rows.count * block.heads.count *
                                           block.batches.count * plan_.local.value_dim));
}

Block BlockFinder::hull_of(const Tile& tile) const {
  Block block;
  block.batches = tile.batches;
  bool exact = true;
  const PositionRanges row_positions = rows_.slice(tile.rows);
  for (const PlacedPiece& placed : tile.columns) {
    std::int64_t first_row = tile.rows.begin.value();
    for (const PositionRange& range : row_positions.ranges()) {
      const Visibility seen =
          context_.input.problem.mask.examine(plan_.first_batch + tile.batches.begin,
                                              tile.batches.count, range, placed.piece.positions);
      if (!seen.empty()) {
        block.pairs += seen.pairs;
        exact = exact && seen.exact;
        block.rows = hull(block.rows, {seen.rows.begin + first_row, seen.rows.count});
        block.columns =
            hull(block.columns, {seen.columns.begin + placed.token, seen.columns.count});
      }
      first_row += range.length;
    }
  }
  if (block.pairs == 0) return block;
  if (context_.input.problem.in_global_order()) return all_of(std::move(block), tile);

  std::vector<PositionRange> positions;
  for (const PlacedPiece& placed : tile.columns) {
    const std::int64_t begin =
        std::max(block.columns.begin.value() - placed.token, std::int64_t{0});
    const std::int64_t end =
        std::min(block.columns.end().value() - placed.token, placed.piece.positions.length);
    if (begin < end) positions.push_back(placed.piece.positions.slice(begin, end - begin));
  }
  block.column_positions = PositionRanges(std::move(positions));
  block.row_positions = rows_.slice(block.rows);
  block.full = exact && !context_.input.problem.call_arguments.change_visibility() &&
               block.pairs == block.rows.count * block.columns.count * tile.batches.count;
  return block;
}

// Joins ranges that continue each other, so that a chunk of a layout does not begin a new tile.
PositionRanges BlockFinder::in_one(const PositionRanges& positions) {
  std::vector<PositionRange> ranges;
  for (const PositionRange& range : positions.ranges()) {
    if (!ranges.empty() && ranges.back().stride == 1 && range.stride == 1 &&
        ranges.back().at(ranges.back().length) == range.start) {
      ranges.back().length += range.length;
    } else {
      ranges.push_back(range);
    }
  }
  return PositionRanges(std::move(ranges));
}

// Unlike hull_of(), keeps rows and columns without visible pairs: the beginning of tiles must not
// depend on other batches.
Block BlockFinder::all_of(Block block, const Tile& tile) const {
  std::vector<PositionRange> positions;
  for (const PlacedPiece& placed : tile.columns) {
    block.columns =
        hull(block.columns, {LocalPosition(placed.token), placed.piece.positions.length});
    positions.push_back(placed.piece.positions);
  }
  block.column_positions = in_one(PositionRanges(std::move(positions)));
  block.rows = tile.rows;
  block.row_positions = in_one(rows_.slice(block.rows));
  return block;
}

// Makes coarse cuts first; parts that are still not simple are cut again.
std::vector<BlockFinder::Tile> BlockFinder::cut(const Tile& tile) const {
  std::vector<Tile> tiles;
  const PositionRanges positions = rows_.slice(tile.rows);
  if (positions.ranges().size() > 1) {
    LocalPosition begin = tile.rows.begin;
    for (const PositionRange& range : positions.ranges()) {
      tiles.push_back({{begin, range.length}, tile.batches, tile.columns});
      begin = begin + range.length;
    }
    return tiles;
  }
  tiles = cut_documents(tile);
  if (tiles.empty() && tile.columns.size() > 1) {
    for (const PlacedPiece& piece : tile.columns) {
      tiles.push_back({tile.rows, tile.batches, {piece}});
    }
  }
  return tiles;
}

// Cuts rows of one range. Batches whose documents differ are taken one by one.
std::vector<BlockFinder::Tile> BlockFinder::cut_documents(const Tile& tile) const {
  const Mask& mask = context_.input.problem.mask;
  if (!mask.has_segments() || tile.rows.count == 0) return {};
  const auto id_of = [&](std::int64_t batch, LocalPosition row) {
    return mask.query_segments(plan_.first_batch +
                               batch)[static_cast<std::size_t>(rows_.global(row).value())];
  };
  const std::int64_t first = tile.batches.begin;
  std::vector<Tile> tiles;
  LocalPosition begin = tile.rows.begin;
  for (LocalPosition row = begin + 1;; row = row + 1) {
    for (std::int64_t batch = first + 1; batch < tile.batches.end(); ++batch) {
      if (id_of(batch, row - 1) != id_of(first, row - 1)) return by_batch(tile);
    }
    if (row < tile.rows.end() && id_of(first, row) == id_of(first, begin)) continue;
    tiles.push_back({{begin, row - begin}, tile.batches, tile.columns});
    if (tiles.size() > kMaximumDocuments) return {};
    if (row == tile.rows.end()) break;
    begin = row;
  }
  if (tiles.size() > 1) return tiles;
  // One document of queries remains; keys may still differ from batch to batch.
  return tile.batches.count > 1 ? by_batch(tile) : std::vector<Tile>{};
}

std::vector<BlockFinder::Tile> BlockFinder::by_batch(const Tile& tile) {
  std::vector<Tile> tiles;
  for (std::int64_t batch = tile.batches.begin; batch < tile.batches.end(); ++batch) {
    tiles.push_back({tile.rows, {batch, 1}, tile.columns});
  }
  return tiles;
}

}  // namespace annulus::ring
