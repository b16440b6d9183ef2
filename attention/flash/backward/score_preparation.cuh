#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"
#include "flash/backward/producer.cuh"
#include "flash/backward/scores.cuh"
#include "flash/backward/tiles.cuh"

namespace annulus::flash::backward {

/// True if the rows of a key tile in a tensor [b,n,t,key] can be copied in bulk. `neighbours`: its
/// keys are neighbours in position.
template <class Tiles, class T>
[[nodiscard]] __device__ __forceinline__ bool can_copy_rows(const Arguments& a,
                                                            const Work<Tiles>& work,
                                                            bool neighbours, const T* data,
                                                            const std::int64_t (&strides)[4]) {
  if (data == nullptr) return true;
  if (strides[3] != 1 || !(neighbours || a.scores.by_column)) return false;
  constexpr std::int64_t kAligned = 16 / sizeof(T);
  const T* const first = data + key_at(a, work.first_column);
  const std::int32_t keys = min(Tiles::kKeys, a.columns - work.first_column);
  return ((strides[0] | strides[1] | strides[2] | keys) & (kAligned - 1)) == 0 &&
         reinterpret_cast<std::uintptr_t>(first) % 16 == 0;
}

/// Two warps of the producer's warpgroup, which copy a step's bias to shared memory while consumers
/// are at the step before, and add its gradient. Without a bias, they copy the dense mask there if
/// they can do so in bulk. Each of the 64 threads has a row of the query tile.
template <class Tiles>
class ScorePreparation {
  static_assert(Tiles::kQueries == 64);
  static constexpr int kBiasStages = Tiles::kBiasStages;

 public:
  __device__ __forceinline__ ScorePreparation(const Arguments& arguments,
                                              SharedTiles<Tiles>& memory)
      : a(arguments), work(memory.work), shared(memory) {}

  __device__ __forceinline__ void run() {
    if (a.scores.bias.data == nullptr && shared.copies_mask == 0) return;
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
  // The step of a stage's bias, as this warp remembers it.
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
        use(&shared.scores.bias[stage()][r][key], entry, row, column);
        if (++row < a.rows) entry += strides[2];
      }
    }
  }

  template <class T>
  [[nodiscard]] __device__ __forceinline__ std::uint32_t row_bytes() const {
    return min(Tiles::kKeys, a.columns - work.first_column) * static_cast<std::uint32_t>(sizeof(T));
  }
  // This thread's row in a tensor that is copied in bulk.
  template <class T>
  [[nodiscard]] __device__ __forceinline__ T* row_in(T* data,
                                                     const std::int64_t (&strides)[4]) const {
    const Step& step = bias_step();
    const std::int32_t row = step.tile * Tiles::kQueries + thread();
    return data + work.batch * strides[0] + step.head * strides[1] +
           min(row, a.rows - 1) * strides[2] + key_at(a, work.first_column);
  }

  template <class T>
  __device__ __forceinline__ void copy_row(const cuda::ScoreArgument<T>& tensor) const {
    hopper::Barrier& full = shared.scores.bias_full[stage()];
    full.arrive_expecting(row_bytes<T>());
    copy_bytes(shared.scores.bias[stage()][thread()], row_in(tensor.data, tensor.strides),
               row_bytes<T>(), full);
  }

  __device__ __forceinline__ void load() const {
    const auto& [data, strides] = a.scores.bias;
    __syncwarp();  // all threads have finished with the stage
    bias_step() = shared.step[at.slot()];
    if (data == nullptr) return copy_row(a.scores.mask);
    if (shared.copies_rows != 0) return copy_row(a.scores.bias);
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
    if (shared.copies_rows != 0) {
      if (bias_step().tile * Tiles::kQueries + thread() < a.rows) {
        asm volatile(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                row_in(a.grad_bias, a.grad_bias_strides)),
            "r"(hopper::shared_address(shared.scores.bias[stage()][thread()])),
            "r"(row_bytes<float>())
            : "memory");
      }
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      return;
    }
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
