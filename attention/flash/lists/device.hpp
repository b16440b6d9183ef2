#pragma once

#include <bit>
#include <cstdint>

// For device functions that tests also run on the CPU.
#ifdef __CUDACC__
#define ANNULUS_DEVICE __device__ __forceinline__
#else
#define ANNULUS_DEVICE inline
#endif

namespace annulus::flash {

ANNULUS_DEVICE std::int32_t smaller(std::int32_t a, std::int32_t b) {
  return a < b ? a : b;
}
ANNULUS_DEVICE std::int32_t larger(std::int32_t a, std::int32_t b) {
  return a < b ? b : a;
}

/// The number of zeros below the lowest bit that is set. At least one bit must be set.
ANNULUS_DEVICE std::int32_t zeros_below(std::uint64_t word) {
#ifdef __CUDA_ARCH__
  return __ffsll(static_cast<long long>(word)) - 1;
#else
  return std::countr_zero(word);
#endif
}

}  // namespace annulus::flash
