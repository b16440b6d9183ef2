#pragma once

#include "flash/backward/arguments.hpp"
#include "flash/softmax.cuh"

namespace annulus::flash::backward {

/// The capped logit of a score, before the cap multiplies it.
[[nodiscard]] __device__ __forceinline__ float tanh_of(const Arguments& a, float score) {
  const float x = score * a.tanh_scale;
  return a.accurate_tanh != 0 ? tanh_accurate(x) : tanh_any(x);
}

/// Replaces each score by its tanh_of(). Called by all threads of a warp. The rate of exponentials
/// limits the softmax, so scores well below the cap get a tanh without exponentials.
template <int kScores>
__device__ __forceinline__ void replace_by_tanh(float (&scores)[kScores], const Arguments& a) {
  float largest = 0;
#pragma unroll
  for (const float score : scores) largest = fmaxf(largest, fabsf(score));
  if (__all_sync(0xffffffff, largest <= a.small_tanh_limit) != 0) {
#pragma unroll
    for (float& score : scores) {
      const float u = score * score;
      score *= fmaf(fmaf(a.small_tanh[2], u, a.small_tanh[1]), u, a.small_tanh[0]);
    }
  } else if (a.accurate_tanh != 0) {
#pragma unroll
    for (float& score : scores) score = tanh_accurate(score * a.tanh_scale);
  } else {
#pragma unroll
    for (float& score : scores) score = tanh_any(score * a.tanh_scale);
  }
}

}  // namespace annulus::flash::backward
