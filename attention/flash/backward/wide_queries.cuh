#pragma once

#include <cstddef>
#include <cstdint>

#include "flash/backward/key_walk.cuh"
#include "flash/backward/producer.cuh"
#include "flash/backward/wide.cuh"
#include "flash/backward/wide_parts.cuh"

// dQ of wide heads, the product of dS and the keys. Each warpgroup has a query tile, whose sums
// stay in registers while key tiles pass by.
namespace annulus::flash::backward {

template <class Tiles>
struct WideQueryMemory {
  using Element = typename Tiles::Element;
  static constexpr int kQueryTiles = kWideQueryTiles;
  static constexpr int kStages = 4;
  alignas(1024) Element key[kStages][Tiles::kKeys * Tiles::kDim];
  alignas(128) uint4 scores[kStages][kQueryTiles][kScoreTileBytes / sizeof(uint4)];
  std::int32_t batch, head;
  std::int32_t first_tile;             ///< of the warpgroups' query tiles
  std::int32_t score_row;              ///< see score_row()
  KeyStep<kQueryTiles> step[kStages];  ///< tile < 0: there are no more
  hopper::Barrier full[kStages], empty[kStages];
  Verdict verdict[kStages];  ///< not 0: keys are special

  /// True if some pair of a step is hidden.
  [[nodiscard]] __device__ __forceinline__ static bool is_masked(const KeyStep<kQueryTiles>& step) {
    bool masked = false;
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) masked = masked || step.seen[i] == Seen::some;
    return masked;
  }
};

/// Called by one thread.
template <class Tiles>
__device__ __forceinline__ void load_keys(const Arguments& a, const Part& part,
                                          WideQueryMemory<Tiles>& shared) {
  using Memory = WideQueryMemory<Tiles>;
  const std::int32_t batch = shared.batch, kv_head = shared.head / a.heads_per_kv_head;
  RingPosition<Memory::kStages> at;
  KeyWalk<Tiles::kKeys, Memory::kQueryTiles> walk(a, batch, shared.head, shared.first_tile,
                                                  part.first_key, part.end_key);
  const bool compact = are_compact(a);
  std::int32_t next[Memory::kQueryTiles];
#pragma unroll
  for (int i = 0; i < Memory::kQueryTiles; ++i) {
    next[i] = (shared.score_row + shared.first_tile + i) * a.grad_scores.places;
  }
  for (KeyStep<Memory::kQueryTiles> step; walk.next(step); at.next()) {
    const std::uint32_t slot = at.slot();
    shared.empty[slot].wait(at.parity() ^ 1);
    shared.step[slot] = step;
    std::uint32_t bytes = Tiles::kKeys * Tiles::kDim * 2;
#pragma unroll
    for (int i = 0; i < Memory::kQueryTiles; ++i) {
      if (step.seen[i] != Seen::nothing) bytes += kScoreTileBytes;
    }
    shared.full[slot].arrive_expecting(bytes);
    copy_tile<Tiles::kDim>(shared.key[slot], a.key, shared.full[slot], hopper::Cache::evict_last,
                           step.tile * Tiles::kKeys, kv_head, batch);
#pragma unroll
    for (int i = 0; i < Memory::kQueryTiles; ++i) {
      if (step.seen[i] == Seen::nothing) continue;
      const std::int32_t tile = compact ? next[i]++ : next[i] + step.tile - part.first_key;
      copy_bytes(shared.scores[slot][i], score_tile(a, tile), kScoreTileBytes, shared.full[slot]);
    }
  }
  shared.empty[at.slot()].wait(at.parity() ^ 1);
  shared.step[at.slot()].tile = -1;
  shared.full[at.slot()].arrive();
}

/// Called by the watchers.
template <class Tiles>
__device__ __forceinline__ void watch_keys(const Arguments& a, WideQueryMemory<Tiles>& shared) {
  using Memory = WideQueryMemory<Tiles>;
  for (RingPosition<Memory::kStages> at;; at.next()) {
    const std::uint32_t slot = at.slot();
    shared.full[slot].wait(at.parity());
    const auto& step = shared.step[slot];
    if (step.tile < 0) return;
    const bool special = (Memory::is_masked(step) || has_scores<Tiles>(a)) &&
                         watch_tile(shared.key[slot], Tiles::kKeys * Tiles::kDim);
    pass_verdict(shared.verdict[slot], special ? 1 : 0, shared.empty[slot]);
  }
}

template <class Tiles>
class WideQueryConsumer : WideConsumer<Tiles> {
  using Base = WideConsumer<Tiles>;
  using Memory = WideQueryMemory<Tiles>;
  using Base::a, Base::kPacked, Base::lane, Base::release, Base::warp;

 public:
  __device__ __forceinline__ WideQueryConsumer(const Arguments& arguments, Memory& memory)
      : Base(arguments), shared(memory) {}

  __device__ __forceinline__ void run() {
    float sum[Tiles::kDim / 2];
#pragma unroll
    for (float& x : sum) x = 0;
    while (true) {
      // Not known to be the same in every step, or what follows from it would fill registers.
      asm volatile("" : "+r"(warp), "+r"(lane));
      shared.full[at.slot()].wait(at.parity());
      const auto& step = shared.step[at.slot()];
      if (step.tile < 0) break;
      const Seen seen = step.seen[warp / 4];
      if (seen != Seen::nothing) add_product(sum, seen == Seen::some || has_scores<Tiles>(a));
      release(shared.empty[at.slot()]);
      at.next();
    }
    if (at.count > 0) add_sum(sum);
  }

 private:
  // dS of the warp's 16 queries: see WideKeyConsumer::leave_scores().
  __device__ __forceinline__ void read_scores(std::uint32_t (&packed)[kPacked]) const {
    const uint4* const scores = shared.scores[at.slot()][warp / 4] + warp % 4 * 128 + lane;
#pragma unroll
    for (int i = 0; i < kPacked; i += 4) {
      const uint4 of_16_keys = scores[8 * i];
      packed[i] = of_16_keys.x;
      packed[i + 1] = of_16_keys.y;
      packed[i + 2] = of_16_keys.z;
      packed[i + 3] = of_16_keys.w;
    }
  }

  template <int kSums>
  __device__ __forceinline__ void add_product(float (&sum)[kSums], bool masked) const {
    std::uint32_t packed[kPacked];
    read_scores(packed);
    const bool special = masked && shared.verdict[at.slot()].wait(at.parity()) != 0;
    Base::add_to(sum, packed, shared.key[at.slot()], special, [&] {
      std::uint32_t hidden = 0;
#pragma unroll
      for (int i = 0; i < kPacked; ++i) {
        const std::uint32_t halves = __vcmpeq2(packed[i], kNegativeZeros);
        hidden |= (halves & 1) << 2 * i | halves >> 31 << (2 * i + 1);
      }
      return hidden;
    });
  }

  template <int kSums>
  __device__ __forceinline__ void add_sum(const float (&sum)[kSums]) const {
    const std::int32_t tile = shared.first_tile + warp / 4;
    if (tile * Tiles::kQueries >= a.padded_rows) return;
    const std::int64_t of_head =
        std::int64_t{shared.batch * a.heads + shared.head} * (a.padded_rows / Tiles::kQueries);
    const float* const lse =
        a.scaled_lse + (of_head + tile) * (Tiles::kQueries + kFlagValues) + Base::first_row();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lse[8 * h] == kInfinity) continue;
      add_sums(a.grad_query, shared.batch, tile * Tiles::kQueries + Base::first_row() + 8 * h,
               shared.head, sum, h, Tiles::sum_scale(a));
    }
  }

  Memory& shared;
  RingPosition<Memory::kStages> at;
};

/// dQ of neighbouring query tiles of a head, in a part. Blocks with many key tiles come first, if
/// the mask is causal.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 1)
    differentiate_wide_queries(const __grid_constant__ Arguments a,
                               const __grid_constant__ Part part) {
  using Memory = WideQueryMemory<Tiles>;
  static_assert(Tiles::kThreads == 128 * (1 + Memory::kQueryTiles));
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = *reinterpret_cast<Memory*>(bytes);
  if (threadIdx.x == 0) {
    const auto index = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t group = part.end_head - part.first_head, heads = part.pairs * group;
    const std::int32_t pair = part.first_pair + index % heads / group;
    const std::int32_t kv_heads = a.heads / a.heads_per_kv_head;
    shared.batch = pair / kv_heads;
    shared.head = (pair - shared.batch * kv_heads) * a.heads_per_kv_head + part.first_head +
                  index % heads % group;
    shared.score_row = score_row(a, part, pair, shared.head);
    const std::int32_t blocks = static_cast<std::int32_t>(gridDim.x) / heads;
    shared.first_tile = part.first_tile + (blocks - 1 - index / heads) * Memory::kQueryTiles;
    for (int i = 0; i < Memory::kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(4 * Memory::kQueryTiles + kWatchers);
      shared.verdict[i].known.init(kWatchers);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    hopper::release_registers<56>();
    if (threadIdx.x >= 32) watch_keys(a, shared);
    if (threadIdx.x == 0) load_keys(a, part, shared);
  } else {
    hopper::take_registers<224>();
    WideQueryConsumer<Tiles>(a, shared).run();
  }
}

}  // namespace annulus::flash::backward
