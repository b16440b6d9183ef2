#pragma once

#include <cuda_fp16.h>
#include <type_traits>

#include "flash/hopper/wgmma.cuh"
#include "flash/kernels.hpp"
#include "flash/result.cuh"
#include "flash/softmax.cuh"
#include "flash/visible.cuh"

namespace annulus::flash {

/// A thread's elements of a tile: rows `row` and row + 8, and of every 8 columns the two from
/// `column` on. It is recomputed at each use, since registers are scarce in between.
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

/// Weights are rounded as 2 to this power times themselves. Dropout may leave a row only small
/// ones, and below 2^-14 the precision of float16 falls. Sums and outputs carry the same factor
/// until the end. The largest weight can exceed 1 by rounding, so it stays well below float16's
/// limit of 2^16.
template <class Element, MaskClass kMask>
[[nodiscard]] constexpr int weight_exponent() {
  return std::is_same_v<Element, __half> && kMask == MaskClass::general ? 12 : 0;
}

/// PlainLogits whose weights are multiplied by 2^kExponent, unless the maximum is so large that the
/// difference would be rounded.
template <int kExponent>
struct EnlargedLogits : PlainLogits {
  [[nodiscard]] __device__ __forceinline__ float shift(float maximum) const {
    const float plain = PlainLogits::shift(maximum);
    if constexpr (kExponent == 0) return plain;
    return is_enlarged(plain) ? plain - kExponent : plain;
  }
  /// The weight of the maximum.
  [[nodiscard]] __device__ __forceinline__ float unit(float maximum) const {
    if constexpr (kExponent == 0) return 1;
    return is_enlarged(PlainLogits::shift(maximum)) ? 1 << kExponent : 1;
  }

 private:
  [[nodiscard]] __device__ __forceinline__ static bool is_enlarged(float shift) {
    return fabsf(shift) < 0x1p23F;
  }
};

/// A thread's two rows of the result: how they are read and written.
template <class Shape, int kWeightExponent>
class ResultRows {
  using Element = typename Shape::Element;
  static constexpr int kOutputs = Shape::kValueDim / 2;

 public:
  __device__ __forceinline__ ResultRows(const Arguments& arguments, const Item& work)
      : a(arguments), item(work) {}

  /// The state so far, or the empty state. The output of the empty state is undefined: the first
  /// weighted sum replaces it.
  __device__ __forceinline__ void load(float (&output)[kOutputs], OnlineSoftmax& softmax) const {
    if (a.state.output == nullptr) {
      softmax = {{a.no_maximum, a.no_maximum}, {0, 0}};
      hopper::leave_undefined(output);
      return;
    }
    const OwnPart own = own_part();
#pragma unroll
    for (int h = 0; h < 2; ++h) load_row(h, own, output, softmax);
  }

  /// `shown`: whether dense mask and bias left the two rows anything visible.
  __device__ __forceinline__ void store(float (&output)[kOutputs], OnlineSoftmax& softmax,
                                        const bool (&shown)[2]) const {
    const OwnPart own = own_part();
    float sum[2], factor[2], lse[2];
    bool ordinary = item.tile.segments > 0 && own.row + 8 < item.tile.live_rows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = quad_sum(softmax.sum[h]);
      ordinary = ordinary && sum[h] > 0;
    }
    if (__all_sync(0xffffffff, ordinary)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factor[h] = reciprocal_fast(sum[h]) * a.value_scale;
        lse[h] = (__fmul_rn(softmax.maximum[h], a.exponent_scale) +
                  log2_fast(sum[h] / unit_of(softmax, h))) *
                 kLn2;
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        finish_row(h, own, output, softmax, shown[h], factor[h], lse[h]);
      }
    }
    if (own.column == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (own.row + 8 * h < item.tile.rows)
          store_lse(a.result, result_row(item, own.row + 8 * h), lse[h]);
      }
    }
    __syncwarp();  // the state may lie where the result does
    if (a.wide_output) {
      store_wide(output, factor, own);
    } else {
      store_narrow(output, factor, own);
    }
  }

 private:
  [[nodiscard]] __device__ __forceinline__ float unit_of(const OnlineSoftmax& softmax,
                                                         int h) const {
    return EnlargedLogits<kWeightExponent>{a.exponent_scale}.unit(softmax.maximum[h]);
  }
  // For any row: also one without weight, past a length, or of an item without keys.
  __device__ __forceinline__ void finish_row(int h, const OwnPart& own, float (&output)[kOutputs],
                                             OnlineSoftmax& softmax, bool shown, float& factor,
                                             float& lse) const {
    // Full tiles contributed to rows past a length too; no tile contributed to items without keys.
    const bool sees_nothing = own.row + 8 * h >= item.tile.live_rows || item.tile.segments == 0;
    if (sees_nothing) load_row(h, own, output, softmax);
    const float sum = quad_sum(softmax.sum[h]);
    factor = 0;
    lse = -kInfinity;
    if (sum != 0) {
      factor = (sees_nothing ? 1.0f : a.value_scale) / sum;
      lse = (__fmul_rn(softmax.maximum[h], a.exponent_scale) + log2f(sum / unit_of(softmax, h))) *
            kLn2;
    } else if (saw_without_weight(a, item, own.row + 8 * h, shown)) {
      factor = kNan;
    }
  }

  __device__ __forceinline__ void load_row(int h, const OwnPart& own, float (&output)[kOutputs],
                                           OnlineSoftmax& softmax) const {
    softmax.maximum[h] = a.no_maximum;
    softmax.sum[h] = 0;
#pragma unroll
    for (int n = 0; n < kOutputs / 4; ++n) {
      output[4 * n + 2 * h] = 0;
      output[4 * n + 2 * h + 1] = 0;
    }
    const std::int32_t row = own.row + 8 * h;
    if (a.state.output == nullptr || row >= item.tile.rows) return;
    const auto lse = static_cast<float>(load_lse(a.state, result_row(item, row)));
    if (lse == -kInfinity) return;
    softmax.maximum[h] = lse * kLog2E / a.exponent_scale;
    const float unit = unit_of(softmax, h);
    if (own.column == 0) softmax.sum[h] = unit;  // of the four threads that share the row
    const float* from = static_cast<const float*>(a.state.output) +
                        output_offset(a.state, result_row(item, row)) + own.column;
#pragma unroll
    for (int n = 0; n < kOutputs / 4; ++n) {
      if (8 * n < a.value_dim) {
        const float2 pair = *reinterpret_cast<const float2*>(from + 8 * n);
        output[4 * n + 2 * h] = pair.x * unit;
        output[4 * n + 2 * h + 1] = pair.y * unit;
      }
    }
  }

  __device__ __forceinline__ void store_wide(const float (&output)[kOutputs],
                                             const float (&factor)[2], const OwnPart& own) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int32_t row = own.row + 8 * h;
      if (row >= item.tile.rows) continue;
      float* to = static_cast<float*>(a.result.output) +
                  output_offset(a.result, result_row(item, row)) + own.column;
#pragma unroll
      for (int n = 0; n < kOutputs / 4; ++n) {
        if (8 * n < a.value_dim) {
          *reinterpret_cast<float2*>(to + 8 * n) =
              make_float2(output[4 * n + 2 * h] * factor[h], output[4 * n + 2 * h + 1] * factor[h]);
        }
      }
    }
  }

  // The four threads of a row exchange pairs, so that each writes 16 bytes. Each exchange handles
  // all pairs at once, to hide the latency of shuffles.
  __device__ __forceinline__ void store_narrow(const float (&output)[kOutputs],
                                               const float (&factor)[2], const OwnPart& own) const {
    constexpr int kPairs = kOutputs / 4;
    const int thread = own.column / 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      std::uint32_t pairs[kPairs];
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        pairs[n] =
            pack<Element>(output[4 * n + 2 * h] * factor[h], output[4 * n + 2 * h + 1] * factor[h]);
      }
      trade<1>(pairs, thread);
      trade<2>(pairs, thread);
      const std::int32_t row = own.row + 8 * h;
      Element* to = static_cast<Element*>(a.result.output) +
                    output_offset(a.result, result_row(item, row)) + 4 * own.column;
      const bool exists = row < item.tile.rows;
#pragma unroll
      for (int n = 0; n < kPairs; n += 4) {
        if (exists && 8 * n + 4 * own.column < a.value_dim) {
          *reinterpret_cast<uint4*>(to + 8 * n) =
              make_uint4(pairs[n], pairs[n + 1], pairs[n + 2], pairs[n + 3]);
        }
      }
    }
  }

  // One of two exchanges, between threads at a distance of 1 and of 2. Together they transpose, for
  // every four pairs, the 4×4 matrix that the four threads hold.
  template <int kDistance, int kPairs>
  __device__ __forceinline__ static void trade(std::uint32_t (&x)[kPairs], int thread) {
    const bool upper = (thread & kDistance) != 0;
    std::uint32_t received[kPairs / 2];
#pragma unroll
    for (int i = 0; i < kPairs / 2; ++i) {
      const int low = i / kDistance * 2 * kDistance + i % kDistance;
      received[i] = __shfl_xor_sync(0xffffffff, upper ? x[low] : x[low + kDistance], kDistance);
    }
#pragma unroll
    for (int i = 0; i < kPairs / 2; ++i) {
      const int low = i / kDistance * 2 * kDistance + i % kDistance;
      (upper ? x[low] : x[low + kDistance]) = received[i];
    }
  }

  const Arguments& a;
  const Item& item;
};

}  // namespace annulus::flash
