#pragma once

#ifdef __CUDACC__
#define ANNULUS_BOTH __host__ __device__
#else
#define ANNULUS_BOTH
#endif

namespace annulus::flash {

inline constexpr float kTanhSeriesLimit = 0.25F;

/// tanh(x) for |x| ≤ kTanhSeriesLimit, with a relative error of 1e-7.
[[nodiscard]] ANNULUS_BOTH inline float tanh_series(float x) {
  const float u = x * x;
  float sum = 62.0F / 2835;
  sum = sum * u - 17.0F / 315;
  sum = sum * u + 2.0F / 15;
  sum = sum * u - 1.0F / 3;
  return sum * u * x + x;
}

}  // namespace annulus::flash

#undef ANNULUS_BOTH
