#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/visible_tiles.hpp>
#include <annulus/core/division.hpp>
#include <annulus/core/error.hpp>
#include <annulus/ring/balance.hpp>

#include "balance/assign_chunks.hpp"

namespace annulus::ring {
namespace {

constexpr std::int64_t kTile = 128;                  // edge of the flash kernel's tiles
constexpr std::int64_t kMaximumPositions = 1 << 28;  // see visible_tiles()
constexpr std::int64_t kFewestChunks = 8;            // per rank, on average
constexpr std::int64_t kMaximumChunks = 1 << 15;

std::int64_t default_granule(std::int64_t length, int ranks) {
  std::int64_t granule = kTile;
  while (granule > 1 && length < granule * kFewestChunks * ranks) granule /= 2;
  while (length > granule * kMaximumChunks) granule *= 2;
  return granule;
}

bool countable(const AttentionShape& shape) {
  return shape.query_length < kMaximumPositions && shape.kv_length < kMaximumPositions;
}

// The chunks of a sequence, with their work still empty.
Chunks chunks_of(const AttentionShape& shape, std::int64_t length, const AssignmentShards& shards,
                 std::optional<std::int64_t> granule) {
  if (!countable(shape)) {
    throw UnsupportedError(
        fmt::format("the balanced sequence layout takes fewer than {} positions, not {}",
                    kMaximumPositions, std::max(shape.query_length, shape.kv_length)));
  }
  if (granule && *granule < 1) {
    throw ArgumentError("sequence granule", std::to_string(*granule), "1 or more");
  }
  const std::int64_t finest = (length + kMaximumChunks - 1) / kMaximumChunks;
  if (granule && *granule < finest) {
    throw ArgumentError("sequence granule", std::to_string(*granule),
                        fmt::format("{} or more, for at most {} chunks", finest, kMaximumChunks));
  }
  return {length, granule.value_or(default_granule(length, shards.sequence)), {}, {}};
}

// The edge of tiles, chosen so that whole tiles fill a chunk.
std::int64_t tile_of(std::int64_t granule) {
  std::int64_t tile = std::min(granule, kTile);
  while (granule % tile != 0) --tile;
  return tile;
}

PositionRange chunk(const Chunks& chunks, std::int64_t index) {
  const std::int64_t begin = index * chunks.granule;
  return {GlobalPosition(begin), std::min(chunks.granule, chunks.length - begin), 1};
}

std::int64_t count_of(const Chunks& chunks) {
  return ceil_divide(chunks.length, chunks.granule);
}

// Calls body(first batch, batches) for the batches of each shard; only once if the mask treats all
// batches alike.
template <class Body>
void for_each_group(const AttentionProblem& problem, int shards, const Body& body) {
  const std::int64_t batches = problem.shape.batch;
  if (!problem.mask.depends_on_batch()) return body(0, std::min<std::int64_t>(batches, 1));
  const std::int64_t each = batches / shards;
  for (int shard = 0; shard < shards; ++shard) body(shard * each, each);
}

void add_rows(Chunks& chunks, const AttentionProblem& problem, const AssignmentShards& shards) {
  for_each_group(problem, shards.batch, [&](std::int64_t batch, std::int64_t batches) {
    chunks.work.push_back(
        visible_tiles(problem, batch, batches, chunks.granule, tile_of(chunks.granule)));
  });
}

// The cost of a cut before each chunk: the share of the keys that this chunk sees before the cut,
// plus the share that the previous chunk sees after it.
void add_cut_costs(Chunks& chunks, const AttentionProblem& problem) {
  const AttentionShape& shape = problem.shape;
  chunks.cut_cost.push_back(0);
  for (std::int64_t i = 1; i < count_of(chunks); ++i) {
    const PositionRange rows = chunk(chunks, i);
    const auto seen = [&](const PositionRange& by, std::int64_t begin, std::int64_t end) {
      return problem.mask.examine(0, shape.batch, by, {GlobalPosition(begin), end - begin, 1})
          .columns.count;
    };
    const std::int64_t cut = rows.start.value();
    chunks.cut_cost.push_back(
        static_cast<double>(seen(rows, 0, cut) + seen(chunk(chunks, i - 1), cut, chunks.length)) /
        static_cast<double>(chunks.length));
  }
}

}  // namespace

Assignment assign_rows(const AttentionProblem& problem, const AssignmentShards& shards,
                       std::optional<std::int64_t> granule) {
  const AttentionShape& shape = problem.shape;
  if (shards.sequence == 1) return Assignment({PositionRanges::all(shape.query_length)});
  Chunks chunks = chunks_of(shape, shape.query_length, shards, granule);
  add_rows(chunks, problem, shards);
  if (shape.query_length == shape.kv_length) add_cut_costs(chunks, problem);
  return assign_chunks(chunks, shards.sequence);
}

Assignment assign_columns(const AttentionProblem& problem, const AssignmentShards& shards,
                          std::optional<std::int64_t> granule) {
  const AttentionShape& shape = problem.shape;
  if (shards.sequence == 1) return Assignment({PositionRanges::all(shape.kv_length)});
  Chunks chunks = chunks_of(shape, shape.kv_length, shards, granule);
  const PositionRange rows{GlobalPosition(0), shape.query_length, 1};
  for_each_group(problem, shards.batch, [&](std::int64_t batch, std::int64_t batches) {
    std::vector<std::int64_t>& work = chunks.work.emplace_back();
    for (std::int64_t i = 0; i < count_of(chunks); ++i) {
      work.push_back(problem.mask.examine(batch, batches, rows, chunk(chunks, i)).pairs);
    }
  });
  return assign_chunks(chunks, shards.sequence);
}

std::optional<double> tile_imbalance(const AttentionProblem& problem, const NamedSharding& query) {
  const AttentionShape& shape = problem.shape;
  if (!countable(shape)) return {};
  const AssignmentShards shards{query.shards(1), query.shards(0)};
  Chunks chunks = chunks_of(shape, shape.query_length, shards, {});
  add_rows(chunks, problem, shards);
  double most = 0;
  double sum = 0;
  for (const std::vector<std::int64_t>& work : chunks.work) {
    for (int shard = 0; shard < shards.sequence; ++shard) {
      double tiles = 0;
      for (const PositionRange& range : query.shard(shard, 1).ranges()) {
        // Steps from chunk to chunk; a wide stride leaps over some.
        for (std::int64_t begin = 0; begin < range.length;) {
          const std::int64_t i = range.at(begin).value() / chunks.granule;
          const PositionRange rows = chunk(chunks, i);
          const std::int64_t end = range.count_below(rows.last() + 1);
          tiles += static_cast<double>(work[static_cast<std::size_t>(i)]) *
                   static_cast<double>(end - begin) / static_cast<double>(rows.length);
          begin = end;
        }
      }
      most = std::max(most, tiles);
      sum += tiles;
    }
  }
  const auto ranks = static_cast<double>(chunks.work.size()) * shards.sequence;
  return sum > 0 ? most * ranks / sum - 1 : 0;
}

}  // namespace annulus::ring
