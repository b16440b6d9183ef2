#pragma once

#include <cstdint>

#include "cuda/dropout_arguments.hpp"

namespace annulus::cuda {

/// See annulus::philox.
__device__ __forceinline__ uint4 philox(uint4 counter, std::uint32_t key0, std::uint32_t key1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t even = std::uint64_t{0xD2511F53} * counter.x;
    const std::uint64_t odd = std::uint64_t{0xCD9E8D57} * counter.z;
    counter = {static_cast<std::uint32_t>(odd >> 32U) ^ counter.y ^ key0,
               static_cast<std::uint32_t>(odd),
               static_cast<std::uint32_t>(even >> 32U) ^ counter.w ^ key1,
               static_cast<std::uint32_t>(even)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

/// The key of this call.
__device__ __forceinline__ uint2 key_of(const DropoutArguments& dropout) {
  if (dropout.called_key == nullptr) return {dropout.key[0], dropout.key[1]};
  return {__ldg(dropout.called_key), __ldg(dropout.called_key + 1)};
}

/// See annulus::Dropout::drops. Batch and head are local, positions global.
__device__ __forceinline__ bool drops(const DropoutArguments& dropout, std::uint32_t batch,
                                      std::uint32_t head, std::int64_t i, std::int64_t j) {
  const uint2 key = key_of(dropout);
  const uint4 words =
      philox({static_cast<std::uint32_t>(j / 32 * 4 + j % 8 / 2), static_cast<std::uint32_t>(i),
              dropout.first_head + head, dropout.first_batch + batch},
             key.x, key.y);
  const int which = static_cast<int>(j % 32 / 8);
  const std::uint32_t low = which % 2 == 0 ? words.x : words.y;
  const std::uint32_t high = which % 2 == 0 ? words.z : words.w;
  return ((which < 2 ? low : high) >> (j % 2 * 16) & 0xffffU) < dropout.threshold;
}

}  // namespace annulus::cuda
