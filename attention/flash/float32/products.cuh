#pragma once

#include <cstdint>

#include "flash/async_copy.cuh"

// Products of tiles of 64 rows in plain float32, for both passes. A thread has 8 own rows. It
// computes their products with 4 other rows (scores), and their sums in 4 of every 64 dims. The 16
// threads that share own rows are every other lane of a warp.
namespace annulus::flash::float32 {

inline constexpr int kTileRows = 64;
inline constexpr int kOwnRows = 8;
inline constexpr int kOtherRows = 4;
using Scores = float[kOwnRows][kOtherRows];

/// The weight of a hidden pair is −0. No other weight is −0.
inline constexpr float kHiddenWeight = -0.0F;
[[nodiscard]] __device__ __forceinline__ bool is_hidden(float weight) {
  return __float_as_uint(weight) == 0x80000000U;
}

[[nodiscard]] __device__ __forceinline__ float4 load_quad(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ void store_quad(float* to, float x, float y, float z, float w) {
  *reinterpret_cast<float4*>(to) = make_float4(x, y, z, w);
}
/// Element i. Unrolled loops know i at compile time.
[[nodiscard]] __device__ __forceinline__ float part(const float4& quad, int i) {
  return i == 0 ? quad.x : i == 1 ? quad.y : i == 2 ? quad.z : quad.w;
}

/// A tile whose rows are own rows of threads. Each group of them begins kShift floats later, at
/// another bank, since a warp reads two groups at a time.
template <int kColumns, int kShift>
struct OwnTile {
  alignas(16) float values[kTileRows * kColumns + kTileRows / kOwnRows * kShift];

  [[nodiscard]] __device__ __forceinline__ float* at(unsigned row) {
    return values + row * kColumns + row / kOwnRows * kShift;
  }
};
template <int kDims>
using OwnRowsTile = OwnTile<kDims, 4>;
/// Weights are also written, by 64 bytes.
using WeightsTile = OwnTile<kTileRows, 16>;

/// A tile whose rows are other rows of threads. Quads of dims trade places inside 32 dims, so that
/// threads read the same dims of different rows from different banks.
template <int kDims>
struct OtherTile {
  alignas(16) float values[kTileRows * kDims];

  [[nodiscard]] __device__ __forceinline__ float* at(unsigned row, unsigned quad) {
    return values + row * kDims + 4 * (quad ^ row / kOtherRows % 8);
  }
};

/// Copies a tile to place(row, quad). Rows from `count` on and dims from `dims` on become zeros.
template <int kDims, unsigned kThreads, class Place>
__device__ __forceinline__ void copy_rows(const float* from, std::int64_t stride,
                                          std::int32_t count, unsigned dims, const Place& place) {
  constexpr unsigned kQuads = kDims / 4;
  constexpr unsigned kStep = kThreads / kQuads;
  const unsigned quad = threadIdx.x % kQuads;
  const unsigned first = threadIdx.x / kQuads;
  const auto rows = static_cast<unsigned>(4 * quad < dims ? count : 0);
  const float* at = from + first * stride + 4 * quad;
#pragma unroll 2
  for (unsigned row = first; row < first + kTileRows; row += kStep) {
    async_copy(place(row, quad), at, row < rows);
    at += kStep * stride;
  }
}

/// product = own·otherᵀ. `own`: the first own row; other(quad): of the first other row.
template <int kDims, class Other>
__device__ __forceinline__ void multiply_rows(Scores& product, const float* own, const Other& other,
                                              int dims) {
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
    for (int j = 0; j < kOtherRows; ++j) product[i][j] = 0;
  }
  const int quads = (dims + 15) / 16 * 4;
#pragma unroll 1
  for (int begin = 0; begin < quads; begin += 4) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float* const rows = other(begin + q);
      float4 y[kOtherRows];
#pragma unroll
      for (int j = 0; j < kOtherRows; ++j) y[j] = load_quad(rows + j * kDims);
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        const float4 x = load_quad(own + i * kDims + 4 * (begin + q));
#pragma unroll
        for (int j = 0; j < kOtherRows; ++j) {
          float& sum = product[i][j];
          sum = fmaf(x.x, y[j].x, sum);
          sum = fmaf(x.y, y[j].y, sum);
          sum = fmaf(x.z, y[j].z, sum);
          sum = fmaf(x.w, y[j].w, sum);
        }
      }
    }
  }
}

/// sums += weights·values, in kParts quads of dims, 64 dims apart. `weights` are those of the first
/// own row. values(row) is the thread's first quad of a row; four rows at a time lie at equal
/// distances. kMasked: values of hidden pairs are not read, since 0 · NaN would be NaN.
template <int kDims, bool kMasked, int kParts, class Values>
__device__ __forceinline__ void add_weighted_rows(float (&sums)[kOwnRows][kParts][4],
                                                  const float* weights, const Values& values) {
#pragma unroll(kParts == 1 ? 2 : 1)
  for (int row = 0; row < kTileRows; row += 4) {
    float4 w[kOwnRows];
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) w[i] = load_quad(weights + i * kTileRows + row);
    const float* const rows = values(row);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const float4 x = load_quad(rows + r * kDims + 64 * p);
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i) {
          const float weight = part(w[i], r);
          if (kMasked && is_hidden(weight)) continue;
          float(&to)[4] = sums[i][p];
          to[0] = fmaf(weight, x.x, to[0]);
          to[1] = fmaf(weight, x.y, to[1]);
          to[2] = fmaf(weight, x.z, to[2]);
          to[3] = fmaf(weight, x.w, to[3]);
        }
      }
    }
  }
}

}  // namespace annulus::flash::float32
