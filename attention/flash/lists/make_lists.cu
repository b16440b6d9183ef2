#include "flash/lists/make_lists.hpp"
#include "flash/lists/tile_walk.hpp"

// Makes lists of key tiles in two passes, with a warp for each query tile. The first pass counts
// segments; the second writes them at offsets that follow from the counts.
namespace annulus::flash {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr unsigned kAll = 0xffffffff;

struct Warp {
  static constexpr int kCount = 32;
  [[nodiscard]] __device__ __forceinline__ static std::int32_t lane() {
    return static_cast<std::int32_t>(threadIdx.x % 32);
  }
  [[nodiscard]] __device__ __forceinline__ static std::int32_t sum(std::int32_t x) {
    return __reduce_add_sync(kAll, x);
  }
  /// The sum over the lanes before this one; `all` becomes that over all lanes.
  [[nodiscard]] __device__ __forceinline__ static std::int32_t sum_before(std::int32_t x,
                                                                          std::int32_t& all) {
    std::int32_t up_to = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const std::int32_t before = __shfl_up_sync(kAll, up_to, distance);
      if (lane() >= distance) up_to += before;
    }
    all = __shfl_sync(kAll, up_to, 31);
    return up_to - x;
  }
};

/// The query tile of this warp, in the order [batches][heads][row tiles].
struct OwnTile {
  std::int32_t index, list, tile, batch, head;
  bool exists;

  __device__ __forceinline__ explicit OwnTile(const ListInput& in) {
    index = static_cast<std::int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
    list = index / in.row_tile_count;
    tile = index - list * in.row_tile_count;
    batch = list / in.heads;
    head = list - batch * in.heads;
    exists = batch < in.batches;
  }
};

__global__ void __launch_bounds__(kThreads)
    count_tiles(const __grid_constant__ ListInput in, const __grid_constant__ ListOutput out) {
  __shared__ std::int32_t segments[kWarps];
  const OwnTile own(in);
  TileCount count;
  if (own.exists) count = count_tile(TileWalk(in, own.batch, own.head, own.tile), Warp());
  const auto warp = static_cast<std::int32_t>(threadIdx.x / 32);
  if (Warp::lane() == 0) segments[warp] = count.segments;
  __syncthreads();
  std::int32_t all = 0;
  const std::int32_t lane = Warp::lane();
  const std::int32_t before = Warp::sum_before(lane < kWarps ? segments[lane] : 0, all);
  const std::int32_t first = __shfl_sync(kAll, before, warp);
  if (threadIdx.x == 0) out.block_segments[blockIdx.x] = all;
  if (!own.exists || lane != 0) return;
  out.places[own.index] = {first, count.segments};
  out.key_tiles[own.index] = count.key_tiles;
}

/// The sum of the first `count` values, for all threads of the block.
__device__ std::int32_t sum_of(const std::int32_t* values, std::int32_t count) {
  __shared__ std::int32_t sums[kWarps];
  std::int32_t sum = 0;
#pragma unroll 4
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kThreads) {
    sum += values[i];
  }
  sum = Warp::sum(sum);
  if (Warp::lane() == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  return Warp::sum(Warp::lane() < kWarps ? sums[Warp::lane()] : 0);
}

/// The number of query tiles of the list that come before this one: tiles with more key tiles, and
/// earlier tiles with as many.
__device__ __forceinline__ std::int32_t rank_of(const std::int32_t* key_tiles, std::int32_t count,
                                                std::int32_t tile) {
  const std::int32_t own = key_tiles[tile];
  std::int32_t before = 0;
  for (std::int32_t i = Warp::lane(); i < count; i += Warp::kCount) {
    before += key_tiles[i] > own || (key_tiles[i] == own && i < tile) ? 1 : 0;
  }
  return Warp::sum(before);
}

/// Writes the keys and ids of a query tile's rows, for masked tiles.
__device__ __forceinline__ void write_rows(const ListInput& in, const ListOutput& out,
                                           std::int32_t batch, const RowTile& rows) {
  if (out.row_keys == nullptr && out.row_ids == nullptr) return;
  for (std::int32_t r = Warp::lane(); r < rows.rows; r += Warp::kCount) {
    const std::int64_t row = static_cast<std::int64_t>(batch) * in.rows + rows.first_row + r;
    const std::int32_t position = rows.start + r * rows.stride;
    if (out.row_keys != nullptr) out.row_keys[row] = row_keys_at(in, batch, position);
    if (out.row_ids == nullptr) continue;
    const QueryRun* const run = query_run_at(in, batch, position);
    out.row_ids[row] = run != nullptr ? run->id : -1;
  }
}

/// Writes the ids of this query tile's share of the columns; the tiles of a list share all of them.
__device__ __forceinline__ void write_columns(const ListInput& in, const ListOutput& out,
                                              const OwnTile& own) {
  if (out.column_ids == nullptr) return;
  const std::int32_t stride = Warp::kCount * in.row_tile_count;
  for (std::int32_t i = 0; i < in.column_range_count; ++i) {
    const ColumnRange range = in.column_ranges[i];
    for (std::int32_t c = Warp::kCount * own.tile + Warp::lane(); c < range.columns; c += stride) {
      const KeyRun* const run = key_run_at(in, own.batch, range.start + c * range.stride);
      out.column_ids[static_cast<std::int64_t>(own.batch) * in.columns + range.first_column + c] =
          run != nullptr ? run->id : -1;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    write_tiles(const __grid_constant__ ListInput in, const __grid_constant__ ListOutput out) {
  const std::int32_t first_of_block =
      sum_of(out.block_segments, static_cast<std::int32_t>(blockIdx.x));
  const OwnTile own(in);
  if (!own.exists) return;
  const TileWalk walk(in, own.batch, own.head, own.tile);
  const TilePlace place = out.places[own.index];
  const std::int32_t first_tile = own.index - own.tile;
  const std::int32_t rank = rank_of(out.key_tiles + first_tile, in.row_tile_count, own.tile);
  if (Warp::lane() == 0) {
    QueryTile tile;
    tile.first_row = walk.rows.first_row;
    tile.rows = walk.rows.rows;
    tile.start = walk.rows.start;
    tile.live_rows = walk.live_rows;
    tile.row_stride = walk.rows.stride;
    tile.first_segment = first_of_block + place.first_segment;
    tile.segments = place.segments;
    tile.key_tiles = out.key_tiles[own.index];
    out.tiles[first_tile + rank] = tile;
  }
  write_segments(walk, Warp(), out.segments + first_of_block + place.first_segment);
  if (own.head != 0) return;
  write_rows(in, out, own.batch, walk.rows);
  write_columns(in, out, own);
}

}  // namespace

std::int64_t list_blocks(std::int64_t tiles) {
  return (tiles + kWarps - 1) / kWarps;
}

cudaError_t launch_lists(const ListInput& input, const ListOutput& output, cudaStream_t stream) {
  const std::int64_t tiles =
      static_cast<std::int64_t>(input.batches) * input.heads * input.row_tile_count;
  const auto blocks = static_cast<unsigned>(list_blocks(tiles));
  count_tiles<<<blocks, kThreads, 0, stream>>>(input, output);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  write_tiles<<<blocks, kThreads, 0, stream>>>(input, output);
  return cudaGetLastError();
}

}  // namespace annulus::flash
