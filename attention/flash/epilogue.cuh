#pragma once

#include "flash/result.cuh"
#include "flash/softmax.cuh"
#include "flash/visible.cuh"

namespace annulus::flash {

/// Which of a tile's elements a thread has: rows `row` and row + 8, and of every 8 columns two from
/// `column` on. Recomputed where needed, since registers are scarce in between.
struct OwnPart {
  std::int32_t row;
  std::int32_t column;
};
__device__ __forceinline__ OwnPart own_part() {
  std::uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  thread -= 128;
  return {static_cast<std::int32_t>(thread / 32 * 16 + thread % 32 / 4),
          static_cast<std::int32_t>(thread % 4 * 2)};
}

/// A thread's two rows of the result: how they are read and written.
template <class Shape>
class ResultRows {
  using Element = typename Shape::Element;
  static constexpr int kOutputs = Shape::kValueDim / 2;

 public:
  __device__ __forceinline__ ResultRows(const Arguments& arguments, const Item& work)
      : a(arguments), item(work) {}

  /// The state so far, or the empty one.
  __device__ __forceinline__ void load(float (&output)[kOutputs], OnlineSoftmax& softmax,
                                       float scale) const {
    const OwnPart own = own_part();
#pragma unroll
    for (int h = 0; h < 2; ++h) load_row(h, own, output, softmax, scale);
  }

  __device__ __forceinline__ void store(float (&output)[kOutputs], OnlineSoftmax& softmax,
                                        float scale) const {
    const OwnPart own = own_part();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Full tiles contributed to rows past a length too.
      if (own.row + 8 * h >= item.tile.live_rows) load_row(h, own, output, softmax, scale);
      float sum = quad_sum(softmax.sum[h]);
      const float top = softmax.maximum[h] * scale;
      float factor = 0;
      float lse = -kInfinity;
      if (sum != 0) {
        if (a.sinks != nullptr) {
          const float* sink = a.sinks + item.head * a.sinks_per_head;
          for (int i = 0; i < a.sinks_per_head; ++i) sum += exp2_fast(sink[i] * kLog2E - top);
        }
        factor = 1.0f / sum;
        lse = (top + log2f(sum)) * kLn2;
      } else if (saw_without_weight(a, item, own.row + 8 * h)) {
        factor = kNan;
      }
#pragma unroll
      for (int n = 0; n < kOutputs / 4; ++n) {
        output[4 * n + 2 * h] *= factor;
        output[4 * n + 2 * h + 1] *= factor;
      }
      if (own.column == 0 && own.row + 8 * h < item.tile.rows) {
        store_lse(a.result, item, own.row + 8 * h, lse);
      }
    }
    __syncwarp();  // the state may lie where the result does
    if (a.wide_output) {
      store_wide(output, own);
    } else {
      store_narrow(output, own);
    }
  }

 private:
  __device__ __forceinline__ void load_row(int h, const OwnPart& own, float (&output)[kOutputs],
                                           OnlineSoftmax& softmax, float scale) const {
    softmax.maximum[h] = a.no_maximum;
    softmax.sum[h] = 0;
#pragma unroll
    for (int n = 0; n < kOutputs / 4; ++n) {
      output[4 * n + 2 * h] = 0;
      output[4 * n + 2 * h + 1] = 0;
    }
    const std::int32_t row = own.row + 8 * h;
    if (a.state.output == nullptr || row >= item.tile.rows) return;
    const auto lse = static_cast<float>(load_lse(a.state, item, row));
    if (lse == -kInfinity) return;
    softmax.maximum[h] = lse * kLog2E / scale;
    if (own.column == 0) softmax.sum[h] = 1;  // of the four threads that share the row
    const float* from =
        static_cast<const float*>(a.state.output) + output_offset(a.state, item, row) + own.column;
#pragma unroll
    for (int n = 0; n < kOutputs / 4; ++n) {
      if (8 * n < a.value_dim) {
        const float2 pair = *reinterpret_cast<const float2*>(from + 8 * n);
        output[4 * n + 2 * h] = pair.x;
        output[4 * n + 2 * h + 1] = pair.y;
      }
    }
  }

  __device__ __forceinline__ void store_wide(const float (&output)[kOutputs],
                                             const OwnPart& own) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int32_t row = own.row + 8 * h;
      if (row >= item.tile.rows) continue;
      float* to =
          static_cast<float*>(a.result.output) + output_offset(a.result, item, row) + own.column;
#pragma unroll
      for (int n = 0; n < kOutputs / 4; ++n) {
        if (8 * n < a.value_dim) {
          *reinterpret_cast<float2*>(to + 8 * n) =
              make_float2(output[4 * n + 2 * h], output[4 * n + 2 * h + 1]);
        }
      }
    }
  }

  // The four threads of a row exchange pairs, so that each writes 16 bytes.
  __device__ __forceinline__ void store_narrow(const float (&output)[kOutputs],
                                               const OwnPart& own) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int32_t row = own.row + 8 * h;
      Element* to = static_cast<Element*>(a.result.output) + output_offset(a.result, item, row);
#pragma unroll
      for (int n = 0; n < kOutputs / 4; n += 4) {
        std::uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          pairs[i] = pack<Element>(output[4 * (n + i) + 2 * h], output[4 * (n + i) + 2 * h + 1]);
        }
        transpose(pairs, own);
        const int column = 8 * n + 4 * own.column;
        if (row < item.tile.rows && column < a.value_dim) {
          *reinterpret_cast<uint4*>(to + column) =
              make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
      }
    }
  }

  // Thread i of four gets element i of each.
  __device__ __forceinline__ static void transpose(std::uint32_t (&x)[4], const OwnPart& own) {
    const int thread = own.column / 2;
    const auto trade = [thread](std::uint32_t& low, std::uint32_t& high, int distance) {
      const bool upper = (thread & distance) != 0;
      const std::uint32_t received = __shfl_xor_sync(0xffffffff, upper ? low : high, distance);
      (upper ? low : high) = received;
    };
    trade(x[0], x[1], 1);
    trade(x[2], x[3], 1);
    trade(x[0], x[2], 2);
    trade(x[1], x[3], 2);
  }

  const Arguments& a;
  const Item& item;
};

}  // namespace annulus::flash
