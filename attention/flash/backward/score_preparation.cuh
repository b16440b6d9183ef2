#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"
#include "flash/backward/scores.cuh"
#include "flash/backward/tiles.cuh"
#include "flash/hopper/tma.cuh"

namespace annulus::flash::backward {

/// Two warps of the producer's warpgroup copy a step's bias to shared memory while consumers are at
/// the step before. They also add the gradient that consumers leave in its place. TMA does both if
/// the tensors and the place of the first key suit it; otherwise, threads copy and add entry by
/// entry. Without a bias, TMA copies the dense mask if it can; otherwise, consumers read it from
/// global memory.
template <class Tiles>
class ScorePreparation {
  static_assert(Tiles::kQueries == 64);
  static constexpr int kBiasStages = Tiles::kBiasStages;

 public:
  __device__ __forceinline__ ScorePreparation(const Arguments& arguments,
                                              SharedTiles<Tiles>& memory)
      : a(arguments), work(memory.work), shared(memory) {}

  __device__ __forceinline__ void run() {
    if (a.scores.bias.data == nullptr && shared.scores.in_boxes == 0) return;
    for (; at.count < steps(); at.next()) {
      shared.query_full[at.slot()].wait(at.parity());
      if (at.count >= kBiasStages) finish_bias();
      load();
    }
    if (a.grad_bias == nullptr) return;
    for (; at.count < steps() + kBiasStages; at.next()) {
      if (at.count >= kBiasStages) finish_bias();
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }

 private:
  [[nodiscard]] __device__ __forceinline__ std::uint32_t steps() const {
    return static_cast<std::uint32_t>(shared.steps);
  }
  // Read anew each time, since registers are few.
  [[nodiscard]] __device__ __forceinline__ static int thread() {
    int thread = 0;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread - 64;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t stage() const {
    return at.count % kBiasStages;
  }
  // The step whose bias the stage holds. Each warp has its own copy.
  [[nodiscard]] __device__ __forceinline__ Step& bias_step() const {
    return shared.scores.bias_step[thread() / 32][stage()];
  }

  // Calls use(entry in shared memory, entry of `data`, row, column) for the entries of this warp's
  // rows that the thread copies one by one. Rows past the end repeat the last row.
  template <class T, class Use>
  __device__ __forceinline__ void for_entries(T* data, const std::int64_t (&strides)[4],
                                              Use use) const {
    const int first = thread() / 32 * 32;
    const Step& step = bias_step();
    data += work.batch * strides[0] + step.head * strides[1];
#pragma unroll 1
    for (int key = thread() % 32; key < Tiles::kKeys; key += 32) {
      const std::int32_t column = work.first_column + key;
      std::int32_t row = step.tile * Tiles::kQueries + first;
      T* entry = data + min(row, a.rows - 1) * strides[2] + key_at(a, column) * strides[3];
#pragma unroll 2
      for (int r = first; r < first + 32; ++r) {
        use(&shared.scores.bias[stage()][key / 32][place_in_box(r, key % 32)], entry, row, column);
        if (++row < a.rows) entry += strides[2];
      }
    }
  }

  // Where the boxes of a stage's tile lie in a tensor with these strides.
  struct Corner {
    std::int32_t key, row, head, batch;
  };
  [[nodiscard]] __device__ __forceinline__ Corner
  corner_in(const std::int64_t (&strides)[4]) const {
    const Step& step = bias_step();
    return {static_cast<std::int32_t>(key_at(a, work.first_column)), step.tile * Tiles::kQueries,
            strides[1] != 0 ? step.head : 0, strides[0] != 0 ? work.batch : 0};
  }

  __device__ __forceinline__ void copy_boxes() const {
    hopper::Barrier& full = shared.scores.bias_full[stage()];
    if (thread() != 0) return full.arrive();
    auto& boxes = shared.scores.bias[stage()];
    const bool bias = a.scores.bias.data != nullptr;
    const auto& strides = bias ? a.scores.bias.strides : a.scores.mask.strides;
    const Corner at = corner_in(strides);
    const int count = bias ? Tiles::kKeys / 32 : 1;
    // If heads share the entries, others read them soon.
    const hopper::Cache cache =
        strides[1] == 0 ? hopper::Cache::evict_last : hopper::Cache::evict_first;
    full.arrive_expecting(count * static_cast<std::uint32_t>(sizeof(boxes[0])));
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      hopper::copy_box(boxes[i], &a.score_boxes, full, cache, at.key + 32 * i, at.row, at.head,
                       at.batch);
    }
  }
  // Boxes may extend past the block's last key. They add 0 there.
  __device__ __forceinline__ void add_boxes() const {
    if (thread() != 0) return;
    const Corner at = corner_in(a.grad_bias_strides);
#pragma unroll 1
    for (int i = 0; i < Tiles::kKeys / 32; ++i) {
      hopper::add_box(&a.bias_gradient_boxes, shared.scores.bias[stage()][i], at.key + 32 * i,
                      at.row, at.head, at.batch);
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }

  __device__ __forceinline__ void load() const {
    __syncwarp();  // all threads have finished with the stage
    bias_step() = shared.step[at.slot()];
    if (shared.scores.in_boxes != 0) return copy_boxes();
    const auto& [data, strides] = a.scores.bias;
    for_entries(data, strides, [](float* to, const float* from, int, int) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(hopper::shared_address(to)),
                   "l"(from)
                   : "memory");
    });
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                     shared.scores.bias_full[stage()].address())
                 : "memory");
  }

  // Waits until the consumers have read the bias that the stage has held until now, and adds its
  // gradient.
  __device__ __forceinline__ void finish_bias() const {
    shared.scores.bias_read[stage()].wait(at.count / kBiasStages % 2 ^ 1);
    if (a.grad_bias == nullptr) return;
    if (shared.scores.in_boxes != 0) return add_boxes();
    for_entries(a.grad_bias, a.grad_bias_strides,
                [&](const float* from, float* to, std::int32_t row, std::int32_t column) {
                  if (row < a.rows && column < a.columns && *from != 0) atomicAdd(to, *from);
                });
  }

  const Arguments& a;
  const Work<Tiles>& work;
  SharedTiles<Tiles>& shared;
  RingPosition<Tiles::kStages> at;
};

}  // namespace annulus::flash::backward
