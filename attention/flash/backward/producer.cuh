#pragma once

#include <cstdint>
#include <type_traits>

#include "flash/backward/kernels.hpp"
#include "flash/backward/order.cuh"
#include "flash/backward/tiles.cuh"
#include "flash/hopper/tma.cuh"
#include "flash/shared.cuh"

// The warpgroup of the main kernel that loads tiles, looks for special keys and adds dQ.
namespace annulus::flash::backward {

__device__ __forceinline__ void copy_bytes(void* target, const void* from, std::uint32_t bytes,
                                           hopper::Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(hopper::shared_address(target)),
      "l"(from), "r"(bytes), "r"(barrier.address())
      : "memory");
}

template <class Tiles>
__device__ __forceinline__ void produce(const Arguments& a, SharedTiles<Tiles>& shared) {
  const Work<Tiles>& work = shared.work;
  constexpr bool kLists = Tiles::kPairs != PairClass::band;
  using hopper::Cache;
  using hopper::copy_box;
  constexpr std::uint32_t kBytes = Tiles::kTileElements * 2 + Tiles::kQueries * 4;
  constexpr std::int32_t kRecord = Tiles::kQueries + kFlagValues;
  shared.key_full.arrive_expecting(2 * Tiles::kKeys * Tiles::kDim * 2);
#pragma unroll
  for (int dim = 0; dim < Tiles::kDim; dim += 64) {
    copy_box(shared.key + Tiles::kKeys * dim, &a.key, shared.key_full, Cache::evict_first, dim,
             work.first_column, work.kv_head, work.batch);
    copy_box(shared.value + Tiles::kKeys * dim, &a.value, shared.key_full, Cache::evict_first, dim,
             work.first_column, work.kv_head, work.batch);
  }
  std::conditional_t<kLists, ListWalk<Work<Tiles>>, BandWalk<Work<Tiles>>> walk(a, work,
                                                                                shared.list_place);
  // Kept in shared memory if registers are few.
  Next<Tiles> own;
  Next<Tiles>& next = kLists ? shared.next : own;
  next = {};
  auto& [step, at] = next;
  for (; walk.next(step); at.next()) {
    const std::int64_t first_value =
        (std::int64_t{work.batch} * a.heads + step.head) * a.padded_rows;
    const std::int32_t slot = at.slot();
    const std::int32_t row = step.tile * Tiles::kQueries;
    shared.query_empty[slot].wait(at.parity() ^ 1);
    shared.step[slot] = step;
    shared.query_full[slot].arrive_expecting(kBytes + kFlagValues * 4);
#pragma unroll
    for (int dim = 0; dim < Tiles::kDim; dim += 64) {
      copy_box(shared.query[slot] + Tiles::kQueries * dim, &a.query, shared.query_full[slot],
               Cache::evict_last, dim, row, step.head, work.batch);
    }
    copy_bytes(shared.lse[slot], a.scaled_lse + (first_value + row) / Tiles::kQueries * kRecord,
               kRecord * 4, shared.query_full[slot]);
    shared.output_empty[slot].wait(at.parity() ^ 1);
    shared.output_full[slot].arrive_expecting(kBytes);
#pragma unroll
    for (int dim = 0; dim < Tiles::kDim; dim += 64) {
      copy_box(shared.grad_output[slot] + Tiles::kQueries * dim, &a.grad_output,
               shared.output_full[slot], Cache::evict_last, dim, row, step.head, work.batch);
    }
    copy_bytes(shared.delta[slot], a.padded_delta + first_value + row, Tiles::kQueries * 4,
               shared.output_full[slot]);
  }
}

/// Called by the threads of three warps.
template <class Tiles>
__device__ __forceinline__ void watch_keys(SharedTiles<Tiles>& shared, int thread) {
  constexpr int kCount = Tiles::kKeys * Tiles::kDim;
  using Element = typename Tiles::Element;
  shared.key_full.wait(0);
  const bool special = any_special<Element, 96>(shared.key, kCount, thread) ||
                       any_special<Element, 96>(shared.value, kCount, thread);
  if (special) atomicOr(&shared.special_keys, 1);
  shared.key_watched.arrive();
}

/// The turns of a step's query tile.
template <class Tiles>
[[nodiscard]] __device__ __forceinline__ Turn turn_of(const Arguments& a, const Work<Tiles>& work,
                                                      const Step& step) {
  return Turn(a.turns + (work.batch * a.heads + step.head) * (a.padded_rows / Tiles::kQueries) +
              step.tile);
}

/// Called by each of kThreads threads: adds dQ of every kThreads-th step, beginning with `first`.
template <class Tiles, int kThreads>
__device__ __forceinline__ void add_queries(const Arguments& a, SharedTiles<Tiles>& shared,
                                            std::int32_t first) {
  constexpr bool kLists = Tiles::kPairs != PairClass::band;
  constexpr int kParts = Tiles::kSplitsKeys ? 2 : 1;
  // Each of several threads has its own buffer, and waits for each of that buffer's phases.
  static_assert(kThreads == 1 || (kThreads == Tiles::kSumBuffers && !Tiles::kSplitsKeys));
  const Work<Tiles>& work = shared.work;
  for (std::int32_t i = first; i < shared.steps; i += kThreads) {
    Step step;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::int32_t buffer = Tiles::kSplitsKeys ? part : i % Tiles::kSumBuffers;
      const std::int32_t round = Tiles::kSplitsKeys ? i : i / Tiles::kSumBuffers;
      shared.sum_full[buffer].wait(round % 2);
      step = shared.sum_step[buffer];
      if (a.turns != nullptr && part == 0) {
        turn_of(a, work, step)
            .wait(kLists ? listed_before(a, work.batch, step, work.key_tile())
                         : work.before(a, step.tile));
      }
#pragma unroll
      for (int box = 0; box < SharedTiles<Tiles>::kSumBoxes; ++box) {
        hopper::add_box(&a.query_sum, shared.grad_query[buffer][box],
                        (Tiles::kSplitsDims ? box : box % 2) * 32,
                        step.tile * Tiles::kQueries + (Tiles::kSplitsDims ? 0 : box / 2 * kBoxRows),
                        step.head, work.batch);
      }
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      shared.sum_empty[buffer].arrive();
      // The parts of a step are added in this order.
      if (a.turns != nullptr && part + 1 < kParts) {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      }
    }
    if (a.turns != nullptr) turn_of(a, work, step).pass(work.key_tile());
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace annulus::flash::backward
