#pragma once

#include <cstdint>
#include <type_traits>

#include "flash/backward/wide_split_keys.cuh"
#include "flash/backward/wide_whole_keys.cuh"

// dK and dV of wide heads. At 192/128, each of two warpgroups has a key tile, except in the general
// class. There, and at 256, two warpgroups share a key tile: the first computes weights and dV, the
// second computes dS and dK.
namespace annulus::flash::backward {

/// dS, dK and dV of one or two key tiles of a key/value head, for the queries of a part.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 1)
    differentiate_wide_keys(const __grid_constant__ Arguments a,
                            const __grid_constant__ Part part) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = *reinterpret_cast<WideKeyMemory<Tiles>*>(bytes);
  if (threadIdx.x == 0) {
    const auto index = static_cast<std::int32_t>(blockIdx.x), place = index / part.pairs;
    // key_tile_order lists every key tile of the call by itself, so it suits only blocks of one key
    // tile in parts that have all of them.
    const bool ordered =
        Tiles::kKeyTiles == 1 && a.mask.key_tile_order != nullptr && are_compact(a);
    const std::int32_t pair = part.first_pair + index - place * part.pairs;
    shared.work.set(
        a, pair,
        ordered ? a.mask.key_tile_order[place] : part.first_key / Tiles::kKeyTiles + place);
    shared.score_row = score_row(a, part, pair, 0);
    shared.work.first_tile = max(shared.work.first_tile, part.first_tile);
    shared.work.last_tile = min(shared.work.last_tile, part.end_tile - 1);
    shared.part = part;
    shared.key_full.init(1);
    for (int i = 0; i < WideKeyMemory<Tiles>::kStages; ++i) {
      shared.query_full[i].init(1);
      shared.output_full[i].init(1);
      shared.query_empty[i].init(8 + kWatchers);
      shared.output_empty[i].init(8);
      if constexpr (Tiles::kKeyTiles == 1) shared.weights.full[i].init(4);
      if constexpr (Tiles::kGeneral) shared.dropped.full[i].init(4);
      shared.verdict[i].known.init(kWatchers);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (a.mask.key_tiles == 0 && shared.work.last_tile < shared.work.first_tile) return;
  if (threadIdx.x < 128) {
    hopper::release_registers<Tiles::kFewRegisters>();
    if (threadIdx.x >= 32) watch_queries(a, shared);
    if (threadIdx.x == 0) load_queries(a, shared);
  } else {
    hopper::take_registers<Tiles::kManyRegisters>();
    using Consumer =
        std::conditional_t<Tiles::kKeyTiles == 1, SplitKeyConsumer<Tiles>, WholeKeyConsumer<Tiles>>;
    Consumer(a, shared).run();
  }
}

}  // namespace annulus::flash::backward
