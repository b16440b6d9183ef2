#pragma once

#include <cstdint>

#include "flash/backward/key_walk.cuh"
#include "flash/backward/tiles.cuh"
#include "flash/backward/walk.cuh"
#include "flash/float32/backward/kernels.hpp"
#include "flash/float32/products.cuh"

// Sizes, work and shared memory of the float32 backward kernels. There are two kernels: in one, a
// thread block owns a key tile and query tiles pass by; in the other, it owns a query tile and key
// tiles pass by.
namespace annulus::flash::backward {

/// As many tiles pass at a time as there are 64 dims. Each group of 128 threads computes the scores
/// of one passing tile, and sums 64 dims of the gradients.
template <int kDims_>
struct Float32Tiles {
  static constexpr int kDims = kDims_;
  static constexpr int kQueries = kFloat32Tile;
  static constexpr int kKeys = kFloat32Tile;
  static constexpr int kPassing = kDims / 64;
  static constexpr int kThreads = 128 * kPassing;
  static constexpr int kBlocks = kDims == 64 ? 2 : 1;  ///< thread blocks of a multiprocessor
};

/// A query tile of a head. Under a causal mask, tiles with many keys come first. Query heads
/// that share keys, and all heads of a section, run together.
struct OwnRows {
  std::int32_t batch, head, tile;

  __device__ __forceinline__ void find(const Arguments& a, std::int32_t index) {
    const std::int32_t tiles = a.padded_rows / kFloat32Tile;
    const std::int32_t heads = a.section_heads * a.heads_per_kv_head;
    const std::int32_t first_head = index / (tiles * heads) * heads;
    const std::int32_t in_section = index - tiles * first_head;
    const std::int32_t section = min(heads, a.batches * a.heads - first_head);
    tile = tiles - 1 - in_section / section;
    head = first_head + in_section % section;
    batch = head / a.heads;
    head -= batch * a.heads;
  }
};

/// The query tiles that a key tile meets.
template <class Tiles>
class PassingQueries {
 public:
  /// Called by one thread.
  __device__ __forceinline__ PassingQueries(const Arguments& arguments, const Work<Tiles>& work,
                                            ListPlace& place)
      : a(arguments),
        band_(arguments, work, place),
        listed_(arguments, work, place, threadIdx.x == 0) {}
  __device__ __forceinline__ bool next(Step& step) {
    return a.mask.key_tiles > 0 ? listed_.next(step) : band_.next(step);
  }

 private:
  const Arguments& a;
  BandWalk<Work<Tiles>> band_;
  ListWalk<Work<Tiles>> listed_;
};

/// The key tiles that a query tile meets.
template <class Tiles>
class PassingKeys {
 public:
  __device__ __forceinline__ PassingKeys(const Arguments& a, const OwnRows& rows)
      : head_(rows.head), walk_(a, rows.batch, rows.head, rows.tile) {}
  __device__ __forceinline__ bool next(Step& step) {
    KeyStep<1> at;
    do {
      if (!walk_.next(at)) return false;
    } while (at.seen[0] == Seen::nothing);
    step = {at.tile, head_, at.seen[0] == Seen::some ? 1 : 0};
    return true;
  }

 private:
  std::int32_t head_;
  KeyWalk<Tiles::kKeys, 1> walk_;
};

/// Shared memory of a thread block.
template <class Tiles>
struct Float32Memory {
  static constexpr int kPassing = Tiles::kPassing;
  static_assert(kFloat32Tile == float32::kTileRows);

  float32::OwnRowsTile<Tiles::kDims> own[2];              ///< Q and dO, or K and V
  float32::OtherTile<Tiles::kDims> passing[2][kPassing];  ///< K and V, or Q and dO
  float32::WeightsTile weights[kPassing];                 ///< P or dS
  /// LSE and delta of the passing queries, or in place 0 of the own queries.
  alignas(16) float lse[kPassing][kFloat32Tile + kFlagValues];
  alignas(16) float delta[kPassing][kFloat32Tile];
  Step step[2][kPassing];  ///< this step and the next; tile < 0: there are no more
  Work<Tiles> work;        ///< of a block that owns keys
  ListPlace list_place;    ///< likewise
  OwnRows rows;            ///< of a block that owns queries
};

}  // namespace annulus::flash::backward
