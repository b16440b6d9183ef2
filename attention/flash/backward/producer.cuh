#pragma once

#include <cstdint>
#include <type_traits>

#include "flash/backward/kernels.hpp"
#include "flash/backward/order.cuh"
#include "flash/backward/scores.cuh"
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

/// Asks L2 for a tile's entries in a bias or dense mask, so that consumers do not wait for memory.
/// Does nothing where a row's entries are not neighbours.
template <class Tiles, class T>
__device__ __forceinline__ void prefetch_scores(const Arguments& a,
                                                const cuda::ScoreArgument<T>& scores,
                                                const SharedTiles<Tiles>& shared, std::int32_t head,
                                                std::int32_t row) {
  if (scores.data == nullptr || scores.strides[3] != 1) return;
  if (shared.neighbours == 0 && !a.scores.by_column) return;
  const std::int32_t column = shared.work.first_column;
  const T* first = scores.row(shared.work.batch, head, row) + key_at(a, column);
  const std::int32_t keys = min(Tiles::kKeys, a.columns - column);
  for (std::int32_t r = min(Tiles::kQueries, a.rows - row); r > 0; --r) {
    const auto ahead = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(first) % 16);
    const std::uint32_t bytes = (keys * static_cast<std::uint32_t>(sizeof(T)) + ahead) / 16 * 16;
    if (bytes > 0) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                       reinterpret_cast<const unsigned char*>(first) - ahead),
                   "r"(bytes)
                   : "memory");
    }
    first += scores.strides[2];
  }
}

template <class Tiles, PairClass kPairs>
__device__ __forceinline__ void produce(const Arguments& a, SharedTiles<Tiles>& shared) {
  const Work<Tiles>& work = shared.work;
  constexpr bool kLists = kPairs != PairClass::band;
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
    if constexpr (kPairs == PairClass::general) {
      prefetch_scores(a, a.scores.bias, shared, step.head, row);
      prefetch_scores(a, a.scores.mask, shared, step.head, row);
    }
  }
}

/// By the threads of three warps.
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

/// By one thread for each of the two buffers of dQ, which take steps by turns.
template <class Tiles, bool kLists>
__device__ __forceinline__ void add_queries(const Arguments& a, SharedTiles<Tiles>& shared,
                                            std::int32_t buffer) {
  constexpr bool kSplitsDims = SharedTiles<Tiles>::kSplitsDims;
  const Work<Tiles>& work = shared.work;
  for (std::int32_t i = buffer; i < shared.steps; i += 2) {
    shared.sum_full[buffer].wait(i / 2 % 2);
    const Step step = shared.sum_step[buffer];
    const auto turn = [&] {
      return Turn(a.turns + (work.batch * a.heads + step.head) * (a.padded_rows / Tiles::kQueries) +
                  step.tile);
    };
    if (a.turns != nullptr) {
      const std::int32_t before =
          kLists ? listed_before(a, work.batch, step, work.key_tile()) : work.before(a, step.tile);
      turn().wait(before);
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      hopper::add_box(
          &a.query_sum, shared.grad_query[buffer][pair], (kSplitsDims ? pair : pair % 2) * 32,
          step.tile * Tiles::kQueries + (kSplitsDims ? 0 : pair / 2 * 64), step.head, work.batch);
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    shared.sum_empty[buffer].arrive();
    if (a.turns != nullptr) turn().pass(work.key_tile());
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace annulus::flash::backward
