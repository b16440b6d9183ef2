#pragma once

#include "flash/backward/consumer.cuh"
#include "flash/backward/kernels.hpp"
#include "flash/backward/producer.cuh"
#include "flash/backward/score_preparation.cuh"
#include "flash/backward/tiles.cuh"
#include "flash/hopper/early_launch.cuh"
#include "flash/shared.cuh"

namespace annulus::flash::backward {

/// Gradients of a key tile and a key/value head, in the manner of FlashAttention-3's backward pass
/// (Shah et al. 2024). Sᵀ rather than S is computed, so that weights stay in registers.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 1)
    differentiate(const __grid_constant__ Arguments a) {
  constexpr bool kLists = Tiles::kPairs != PairClass::band;
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = *reinterpret_cast<SharedTiles<Tiles>*>(bytes);
  if (threadIdx.x == 0) {
    shared.special_keys = 0;
    shared.key_full.init(1);
    shared.key_watched.init(96);
    for (int i = 0; i < Tiles::kStages; ++i) {
      shared.query_full[i].init(1);
      shared.output_full[i].init(1);
      shared.query_empty[i].init(8);
      shared.output_empty[i].init(8);
    }
    for (int i = 0; i < Tiles::kSumBuffers; ++i) {
      shared.sum_full[i].init(Tiles::kSumWarps);
      shared.sum_empty[i].init(1);
    }
    if constexpr (Tiles::kGeneral) {
      for (hopper::Barrier& barrier : shared.scores.bias_full) barrier.init(64);
      for (hopper::Barrier& barrier : shared.scores.bias_read) barrier.init(8);
    }
    hopper::fence_barrier_init();
    hopper::await_kernel_before();
    Work<Tiles>& work = shared.work;
    work.find(a, work_index(a));
    shared.steps = kLists ? 0 : (work.last_tile - work.first_tile + 1) * a.heads_per_kv_head;
  }
  __syncthreads();
  if constexpr (Tiles::kDrops) {
    const std::int32_t* const positions = a.mask.column_positions + shared.work.first_column;
    const auto key = static_cast<std::int32_t>(threadIdx.x);
    const bool is_next = key >= Tiles::kKeys || is_neighbour(positions[key], positions[0], key);
    const bool all = __syncthreads_and(is_next) != 0;
    if (threadIdx.x == 0) {
      shared.neighbours = all ? 1 : 0;
      if constexpr (Tiles::kGeneral) {
        // TMA's boxes begin at multiples of 16 bytes.
        const std::int64_t unit = a.scores.bias.data != nullptr ? 4 : 16;
        const bool fits = key_at(a, shared.work.first_column) % unit == 0;
        shared.scores.in_boxes = a.has_score_boxes && fits && (all || a.scores.by_column) ? 1 : 0;
      }
    }
  }
  if constexpr (kLists) {
    atomicAdd(&shared.steps, steps_of_thread(a, shared.work));
    __syncthreads();
  }
  if (shared.steps <= 0) return;
  if (threadIdx.x < 128) {
    hopper::release_registers<Tiles::kFewRegisters>();
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      produce<Tiles>(a, shared);
    } else if (thread >= 32) {
      watch_keys<Tiles>(shared, thread - 32);
      // One thread adds dQ where two warps prepare scores.
      if (Tiles::kGeneral && thread >= 64) {
        if constexpr (Tiles::kGeneral) ScorePreparation<Tiles>(a, shared).run();
      } else if (a.grad_query.data != nullptr && thread % 32 == 0) {
        constexpr int kThreads = Tiles::kGeneral ? 1 : 2;
        if (thread / 32 <= kThreads) add_queries<Tiles, kThreads>(a, shared, thread / 32 - 1);
      }
    }
  } else {
    hopper::take_registers<Tiles::kManyRegisters>();
    Consumer<Tiles>(a, shared).run();
  }
}

template <class Tiles>
cudaError_t launch(const Arguments& a, unsigned blocks, cudaStream_t stream) {
  constexpr std::size_t kShared = sizeof(SharedTiles<Tiles>);
  static_assert(kShared <= 227 * 1024);
  const auto kernel = &differentiate<Tiles>;
  if (const cudaError_t code =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)) {
    return code;
  }
  return hopper::launch_early(kernel, blocks, Tiles::kThreads, kShared, stream, a);
}

}  // namespace annulus::flash::backward
