#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <limits>

#include "flash/arguments.hpp"
#include "flash/tanh_series.hpp"

namespace annulus::flash {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kLargest = std::numeric_limits<float>::max();
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// 1/x, with an error of one unit in the last place, for x that is not denormal.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// log2(x), with an error of 2^-22, for x that is not denormal.
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// tanh(x) by an exponential and a division, with an absolute error of 3e-7.
__device__ __forceinline__ float tanh_any(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x * (2 * kLog2E)));
}
/// The same with a relative error of 1e-6: small ones by a series.
__device__ __forceinline__ float tanh_accurate(float x) {
  const float small = tanh_series(x);
  return fabsf(x) <= kTanhSeriesLimit ? small : tanh_any(x);
}

/// Replaces scores by the tanh of the capped logit, before the cap multiplies it.
template <int kScores>
__device__ __forceinline__ void replace_by_tanh(float (&scores)[kScores], const Arguments& a) {
  if (a.accurate_tanh != 0) {
#pragma unroll
    for (float& score : scores) score = tanh_accurate(score * a.scale);
  } else {
#pragma unroll
    for (float& score : scores) score = tanh_any(score * a.scale);
  }
}

/// The larger of two numbers; NaN if one is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

/// Reduces over the four threads that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

__device__ __forceinline__ bool quad_any(bool x) {
  x = __shfl_xor_sync(0xffffffff, x ? 1 : 0, 1) != 0 || x;
  return __shfl_xor_sync(0xffffffff, x ? 1 : 0, 2) != 0 || x;
}

template <class Element>
__device__ __forceinline__ std::uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
template <>
__device__ __forceinline__ std::uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

/// How the softmax reads scores: a score's weight is 2 to the power of exponent(x, shift(maximum)).
struct PlainLogits {
  float scale;  ///< times log2 e
  [[nodiscard]] __device__ __forceinline__ float shift(float maximum) const {
    return __fmul_rn(maximum, scale);
  }
  [[nodiscard]] __device__ __forceinline__ float value(float x) const { return x; }
  [[nodiscard]] __device__ __forceinline__ float exponent(float x, float shift) const {
    return fmaf(x, scale, -shift);
  }
};
/// Scores before the soft cap that are small enough for SmallTanh: its values, and those times the
/// scale.
struct SmallCappedLogits {
  const float (&tanh)[3];
  const float (&scaled_tanh)[3];
  float scale;
  [[nodiscard]] __device__ __forceinline__ float shift(float maximum) const {
    return __fmul_rn(maximum, scale);
  }
  [[nodiscard]] __device__ __forceinline__ float value(float x) const {
    const float u = x * x;
    return x * fmaf(fmaf(tanh[2], u, tanh[1]), u, tanh[0]);
  }
  [[nodiscard]] __device__ __forceinline__ float exponent(float x, float shift) const {
    const float u = x * x;
    return fmaf(x, fmaf(fmaf(scaled_tanh[2], u, scaled_tanh[1]), u, scaled_tanh[0]), -shift);
  }
};

/// The running maximum and sum of exponentials of a thread's two rows (Milakov & Gimelshein 2018).
/// Element 4n + 2h + e of a tile of scores lies in row h. `sum` is this thread's share of the
/// row's.
struct OnlineSoftmax {
  float maximum[2];  ///< of the values, before scaling; Arguments::no_maximum of none
  float sum[2];

  /// Expresses the same sum relative to a maximum lower by `exponent` (log 2 units, after scaling).
  /// The output so far must then be multiplied by 2^exponent.
  __device__ __forceinline__ void lower(float exponent, float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maximum[h] -= exponent / scale;
      sum[h] *= exp2_fast(exponent);
    }
  }

  /// Replaces scores by their weights relative to the new maximum. Returns in `factor` what earlier
  /// results must be multiplied by.
  template <class Logits, int kScores>
  __device__ __forceinline__ void update(float (&scores)[kScores], const Logits& logits,
                                         float (&factor)[2]) {
    float largest[2] = {-kInfinity, -kInfinity};
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      largest[0] = fmaxf(fmaxf(largest[0], scores[i]), scores[i + 1]);
      largest[1] = fmaxf(fmaxf(largest[1], scores[i + 2]), scores[i + 3]);
    }
    update(scores, largest, logits, factor);
  }

  /// The same, given this thread's largest scores.
  template <class Logits, int kScores>
  __device__ __forceinline__ void update(float (&scores)[kScores], const float (&largest)[2],
                                         const Logits& logits, float (&factor)[2]) {
    float shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Values rise with scores.
      const float now = fmaxf(maximum[h], logits.value(quad_max(largest[h])));
      shift[h] = logits.shift(now);
      // The earlier weights are relative to a rounded product too. Fused with the
      // difference, it would not be: even a maximum that stays would change the sum with every
      // tile.
      factor[h] = exp2_fast(logits.shift(maximum[h]) - shift[h]);
      maximum[h] = now;
      sum[h] *= factor[h];
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int h = i / 2 % 2;
      scores[i] = exp2_fast(logits.exponent(scores[i], shift[h]));
      sum[h] += scores[i];
    }
  }
};

}  // namespace annulus::flash
