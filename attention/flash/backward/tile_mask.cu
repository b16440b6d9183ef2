#include "flash/backward/tile_mask.hpp"
#include "flash/lists/tile_walk.hpp"

namespace annulus::flash::backward {
namespace {

constexpr int kThreads = 128;
constexpr std::int32_t kEnd = TileMask::kNowhere;

__device__ __forceinline__ std::int32_t index_of_thread() {
  return static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
}

__device__ __forceinline__ std::int32_t query_block_of(const ListInput& in, std::int32_t position) {
  return position / in.query_block;
}

// A thread for each row of each tile of the input.
__global__ void __launch_bounds__(kThreads)
    find_rows(const __grid_constant__ ListInput in, const __grid_constant__ TileMask mask,
              std::int32_t padded_rows) {
  const RowTile tile = in.row_tiles[blockIdx.x];
  for (auto r = static_cast<std::int32_t>(threadIdx.x); r < tile.rows; r += kThreads) {
    const std::int32_t row = tile.first_row + r;
    const std::int32_t position = tile.start + r * tile.stride;
    if (mask.row_blocks != nullptr) mask.row_blocks[row] = query_block_of(in, position);
    if (mask.row_positions != nullptr) mask.row_positions[row] = position;
    for (std::int32_t batch = 0; batch < in.batches; ++batch) {
      RowKeys keys = row_keys_at(in, batch, position);
      if (in.by_rule == 0) {
        keys.rest = common(keys.rest, {position + in.low, position + in.high + 1});
      }
      if (in.kv_lengths != nullptr) {
        const Document present{0, in.kv_lengths[batch]};
        keys = {common(keys.rest, present), common(keys.opening, present)};
      }
      if (in.query_lengths != nullptr && position >= in.query_lengths[batch]) keys = {};
      const std::int64_t at = std::int64_t{batch} * padded_rows + row;
      if (mask.row_ids != nullptr) {
        const QueryRun* const run = query_run_at(in, batch, position);
        mask.row_ids[at] = run != nullptr ? run->id : -1;
        if (run == nullptr) keys = {};
      }
      mask.row_keys[at] = keys;
    }
  }
}

// A thread for each column of the mask's tiles.
__global__ void __launch_bounds__(kThreads)
    find_columns(const __grid_constant__ ListInput in, const __grid_constant__ TileMask mask,
                 std::int32_t padded_columns) {
  const std::int32_t column = index_of_thread();
  if (column >= padded_columns) return;
  std::int32_t position = TileMask::kNowhere;
  for (std::int32_t i = 0; i < in.column_range_count; ++i) {
    const ColumnRange range = in.column_ranges[i];
    const std::int32_t inside = column - range.first_column;
    if (inside >= 0 && inside < range.columns) position = range.start + inside * range.stride;
  }
  mask.column_positions[column] = position;
  if (mask.column_ids == nullptr) return;
  for (std::int32_t batch = 0; batch < in.batches; ++batch) {
    const KeyRun* const run =
        position == TileMask::kNowhere ? nullptr : key_run_at(in, batch, position);
    mask.column_ids[std::int64_t{batch} * padded_columns + column] = run != nullptr ? run->id : -1;
  }
}

__device__ __forceinline__ void widen(Document& any, const Document& keys) {
  if (keys.begin >= keys.end) return;
  any = {min(any.begin, keys.begin), max(any.end, keys.end)};
}

// A thread for each tile of rows, and of columns.
__global__ void __launch_bounds__(kThreads)
    find_hulls(const __grid_constant__ ListInput in, const __grid_constant__ TileMask mask,
               std::int32_t tile_rows, std::int32_t tile_columns) {
  std::int32_t index = index_of_thread();
  if (index < mask.batches * mask.query_tiles) {
    const std::int32_t batch = index / mask.query_tiles;
    const std::int32_t first = (index - batch * mask.query_tiles) * tile_rows;
    const std::int32_t end = min(first + tile_rows, in.rows);
    RowHull hull{{{kEnd, 0}, {kEnd, 0}}, {{0, kEnd}, {0, kEnd}}, kEnd, -1, kEnd, -1};
    for (std::int32_t row = first; row < end; ++row) {
      const std::int64_t at = std::int64_t{batch} * mask.query_tiles * tile_rows + row;
      const RowKeys keys = mask.row_keys[at];
      widen(hull.any.rest, keys.rest);
      widen(hull.any.opening, keys.opening);
      hull.all = {common(hull.all.rest, keys.rest), common(hull.all.opening, keys.opening)};
      if (mask.row_ids != nullptr) {
        hull.first_id = min(hull.first_id, mask.row_ids[at]);
        hull.last_id = max(hull.last_id, mask.row_ids[at]);
      }
      if (mask.row_blocks != nullptr) {
        hull.first_block = min(hull.first_block, mask.row_blocks[row]);
        hull.last_block = max(hull.last_block, mask.row_blocks[row]);
      }
    }
    mask.row_hulls[index] = hull;
    return;
  }
  index -= mask.batches * mask.query_tiles;
  if (index >= mask.batches * mask.key_tiles) return;
  const std::int32_t batch = index / mask.key_tiles;
  const std::int32_t first = (index - batch * mask.key_tiles) * tile_columns;
  ColumnHull hull{kEnd, -1, kEnd, -1};
  for (std::int32_t column = first; column < first + tile_columns; ++column) {
    const std::int32_t position = mask.column_positions[column];
    if (position == TileMask::kNowhere) {
      hull.last = kEnd;  // no row sees it, so none sees all
      break;
    }
    hull.first = min(hull.first, position);
    hull.last = max(hull.last, position);
    if (mask.column_ids != nullptr) {
      const std::int32_t id =
          mask.column_ids[std::int64_t{batch} * mask.key_tiles * tile_columns + column];
      hull.first_id = min(hull.first_id, id);
      hull.last_id = max(hull.last_id, id);
    }
  }
  mask.column_hulls[index] = hull;
}

struct Seen {
  bool any, all;
};

__device__ __forceinline__ Seen both(Seen a, Seen b) {
  return {a.any && b.any, a.all && b.all};
}

__device__ __forceinline__ Seen seen_of(const Document& any, const Document& all,
                                        const ColumnHull& columns) {
  return {any.begin <= columns.last && columns.first < any.end,
          all.begin <= columns.first && columns.last < all.end};
}

__device__ Seen seen_blocks(const TileMask& mask, std::int32_t batch, std::int32_t head,
                            const RowHull& rows, const ColumnHull& columns, std::int32_t last_key) {
  const std::int32_t first = columns.first / mask.key_block;
  const std::int32_t last = min(columns.last, last_key) / mask.key_block;
  Seen seen{false, true};
  for (std::int32_t q = rows.first_block; q <= rows.last_block; ++q) {
    const std::uint64_t* const words =
        mask.blocks + (mask.first_block_row + batch * mask.batch_rows + head * mask.head_rows + q) *
                          mask.words_per_row;
    for (std::int32_t w = first / 64; w <= last / 64; ++w) {
      std::uint64_t asked = ~std::uint64_t{0};
      if (w == first / 64) asked &= ~std::uint64_t{0} << first % 64;
      if (w == last / 64) asked &= ~std::uint64_t{0} >> (63 - last % 64);
      seen.any = seen.any || (words[w] & asked) != 0;
      seen.all = seen.all && (words[w] & asked) == asked;
    }
  }
  return seen;
}

__device__ Seen seen_of(const TileMask& mask, std::int32_t batch, std::int32_t head,
                        std::int32_t query_tile, std::int32_t key_tile, std::int32_t last_key) {
  if (query_tile >= mask.query_tiles || key_tile >= mask.key_tiles) return {false, false};
  const RowHull& rows = mask.row_hulls[batch * mask.query_tiles + query_tile];
  const ColumnHull& columns = mask.column_hulls[batch * mask.key_tiles + key_tile];
  const Seen rest = seen_of(rows.any.rest, rows.all.rest, columns);
  const Seen opening = seen_of(rows.any.opening, rows.all.opening, columns);
  Seen seen{rest.any || opening.any, rest.all || opening.all};
  if (mask.row_ids != nullptr) {
    seen = both(seen, {rows.first_id <= columns.last_id && columns.first_id <= rows.last_id,
                       rows.first_id == rows.last_id && columns.first_id == columns.last_id &&
                           rows.first_id == columns.first_id});
  }
  if (mask.row_blocks != nullptr && seen.any) {
    seen = both(seen, seen_blocks(mask, batch, head, rows, columns, last_key));
  }
  return seen;
}

// A warp for each word of bits: bits of query tiles for a key tile, and the other way round.
__global__ void __launch_bounds__(kThreads)
    find_bits(const __grid_constant__ TileMask mask, std::int32_t last_key) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const std::int64_t lists = std::int64_t{mask.batches} * mask.heads;
  const std::int64_t query_words = lists * mask.key_tiles * mask.query_words;
  std::int64_t word = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  const bool of_queries = word < query_words;
  if (!of_queries) word -= query_words;
  if (!of_queries && word >= lists * mask.query_tiles * mask.key_words) return;
  const std::int32_t words = of_queries ? mask.query_words : mask.key_words;
  const std::int32_t tiles = of_queries ? mask.key_tiles : mask.query_tiles;
  const auto across = static_cast<std::int32_t>(word % words) * 32 + lane;
  const auto along = static_cast<std::int32_t>(word / words % tiles);
  const auto list = static_cast<std::int32_t>(word / words / tiles);
  const std::int32_t batch = list / mask.heads;
  const std::int32_t head = list - batch * mask.heads;
  const Seen seen = seen_of(mask, batch, head, of_queries ? across : along,
                            of_queries ? along : across, last_key);
  const std::uint32_t any = __ballot_sync(0xffffffff, seen.any);
  const std::uint32_t all = __ballot_sync(0xffffffff, seen.all);
  if (lane != 0) return;
  if (of_queries) {
    mask.query_bits[2 * word] = any;
    mask.query_bits[2 * word + 1] = all;
  } else {
    mask.key_bits[word] = any;
  }
}

// One warp per key tile.
__global__ void __launch_bounds__(kThreads) find_work(const __grid_constant__ TileMask mask) {
  constexpr std::uint32_t kAll = 0xffffffff;
  const std::int32_t tile = index_of_thread() / 32;
  if (tile >= mask.key_tiles) return;
  TileWork work{};
  for (std::int32_t list = 0; list < mask.batches * mask.heads; ++list) {
    const std::uint32_t* const bits =
        mask.query_bits + (std::int64_t{list} * mask.key_tiles + tile) * mask.query_words * 2;
    std::int32_t first = kEnd, last = -1;
    for (auto word = static_cast<std::int32_t>(threadIdx.x % 32); word < mask.query_words;
         word += 32) {
      const std::uint32_t visible = bits[2 * word];
      if (visible == 0) continue;
      work.steps += __popc(visible);
      first = min(first, word * 32 + __ffs(static_cast<int>(visible)) - 1);
      last = max(last, word * 32 + 31 - __clz(static_cast<int>(visible)));
    }
    last = __reduce_max_sync(kAll, last);
    if (last >= 0) work.span += last + 1 - __reduce_min_sync(kAll, first);
  }
  work.steps = __reduce_add_sync(kAll, work.steps);
  if (threadIdx.x % 32 == 0) mask.work[tile] = work;
}

// A thread for each row of key_bits.
__global__ void __launch_bounds__(kThreads)
    find_ranks(const __grid_constant__ TileMask mask, std::int32_t rows) {
  const std::int32_t row = index_of_thread();
  if (row >= rows) return;
  const std::int64_t first = std::int64_t{row} * mask.key_words;
  std::int32_t rank = 0;
  for (std::int32_t word = 0; word < mask.key_words; ++word) {
    mask.key_ranks[first + word] = rank;
    rank += __popc(mask.key_bits[first + word]);
  }
  atomicMax(mask.most_keys, rank);
}

}  // namespace

cudaError_t launch_tile_mask(const ListInput& input, const TileMask& mask, int tile_rows,
                             int tile_columns, std::int32_t last_key, cudaStream_t stream) {
  const auto blocks = [](std::int64_t threads) {
    return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  };
  const std::int32_t padded_rows = mask.query_tiles * tile_rows;
  const std::int32_t padded_columns = mask.key_tiles * tile_columns;
  // Rows past the last one see nothing. The bias that is read for them is another row's, and may
  // not be finite.
  const cudaError_t error = cudaMemsetAsync(
      mask.row_keys, 0, sizeof(RowKeys) * static_cast<std::size_t>(mask.batches) * padded_rows,
      stream);
  if (error != cudaSuccess) return error;
  find_rows<<<static_cast<unsigned>(input.row_tile_count), kThreads, 0, stream>>>(input, mask,
                                                                                  padded_rows);
  find_columns<<<blocks(padded_columns), kThreads, 0, stream>>>(input, mask, padded_columns);
  find_hulls<<<blocks(std::int64_t{mask.batches} * (mask.query_tiles + mask.key_tiles)), kThreads,
               0, stream>>>(input, mask, tile_rows, tile_columns);
  const std::int64_t lists = std::int64_t{mask.batches} * mask.heads;
  const std::int64_t words =
      lists * mask.key_tiles * mask.query_words + lists * mask.query_tiles * mask.key_words;
  find_bits<<<blocks(words * 32), kThreads, 0, stream>>>(mask, last_key);
  find_work<<<blocks(std::int64_t{mask.key_tiles} * 32), kThreads, 0, stream>>>(mask);
  if (mask.key_ranks != nullptr) {
    const cudaError_t cleared = cudaMemsetAsync(mask.most_keys, 0, sizeof(std::int32_t), stream);
    if (cleared != cudaSuccess) return cleared;
    find_ranks<<<blocks(lists * mask.query_tiles), kThreads, 0, stream>>>(
        mask, static_cast<std::int32_t>(lists * mask.query_tiles));
  }
  return cudaGetLastError();
}

}  // namespace annulus::flash::backward
