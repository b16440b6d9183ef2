#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <initializer_list>
#include <limits>
#include <string>

#include <annulus/core/error.hpp>
#include <annulus/core/tensor.hpp>

// Elementwise kernels over [b, t, n, D] arrays, whose unit of work is one vector of D elements.
namespace annulus::cuda {

constexpr int kWarp = 32;
constexpr int kThreads = 256;

/// The vectors of a launch, and the neighbouring lanes that share one.
struct VectorGrid {
  unsigned vectors = 0, rows = 0, heads = 0;  // vectors = batch · rows · heads
  int packs = 0;                              // of a vector
  int lanes = 1;                              // a power of two, at most a warp

  [[nodiscard]] unsigned blocks() const {
    constexpr unsigned kMaximum = 132 * 16;
    const unsigned groups = kThreads / static_cast<unsigned>(lanes);
    const unsigned wanted = (vectors + groups - 1) / groups;
    return wanted < kMaximum ? wanted : kMaximum;
  }
};

inline VectorGrid vector_grid(const Extents& shape, int width) {
  const std::int64_t vectors = shape[0] * shape[1] * shape[2];
  if (vectors > std::numeric_limits<std::int32_t>::max() ||
      shape[3] > std::numeric_limits<std::int32_t>::max()) {
    throw InternalError("an array of " + to_string(shape) + " is too large for one launch");
  }
  VectorGrid grid{static_cast<unsigned>(vectors), static_cast<unsigned>(shape[1]),
                  static_cast<unsigned>(shape[2]), static_cast<int>(shape[3] / width), 1};
  while (grid.lanes < kWarp && grid.lanes < grid.packs) grid.lanes *= 2;
  return grid;
}

/// Calls body(b, t, n, lane, mask) for the vectors of this thread; `mask` has the lanes that share
/// the vector, which all make the call.
template <class Body>
__device__ void for_each_vector(const VectorGrid& grid, Body body) {
  const unsigned lanes = static_cast<unsigned>(grid.lanes);
  const unsigned groups = blockDim.x / lanes;
  const unsigned first = threadIdx.x % kWarp / lanes * lanes;
  const unsigned mask = (lanes == kWarp ? ~0U : (1U << lanes) - 1U) << first;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * groups + threadIdx.x / lanes; i < grid.vectors;
       i += std::uint64_t{gridDim.x} * groups) {
    const unsigned vector = static_cast<unsigned>(i);
    const unsigned n = vector % grid.heads;
    const unsigned t = vector / grid.heads % grid.rows;
    body(vector / grid.heads / grid.rows, t, n, static_cast<int>(threadIdx.x % lanes), mask);
  }
}

/// Data and strides, in elements, of the first three dimensions.
template <class T>
struct Strided {
  T* data;
  std::int64_t strides[3];
  __device__ T* at(std::int64_t i, std::int64_t j, std::int64_t k) const {
    return data + i * strides[0] + j * strides[1] + k * strides[2];
  }
};

template <class T, class View>
Strided<T> strided(const View& view) {
  return {static_cast<T*>(view.data()), {view.stride(0), view.stride(1), view.stride(2)}};
}

/// `width` elements, moved at most sixteen bytes at a time.
template <class T, int width>
struct alignas(sizeof(T) * width < 16 ? sizeof(T) * width : 16) Pack {
  T at[width];
};

/// True if packs of `width` elements tile every vector of the view at aligned addresses.
template <class View>
bool tiled_by(const View& view, int width) {
  const auto bytes = static_cast<std::int64_t>(size_of(view.dtype()));
  const std::int64_t alignment = bytes * width < 16 ? bytes * width : 16;
  if (view.size(3) % width != 0) return false;
  if (reinterpret_cast<std::uintptr_t>(view.data()) % static_cast<std::uintptr_t>(alignment) != 0) {
    return false;
  }
  for (int dim = 0; dim < 3; ++dim) {
    if (view.size(dim) > 1 && view.stride(dim) * bytes % alignment != 0) return false;
  }
  return true;
}

__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(__half value) {
  return __half2float(value);
}
__device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ inline void round_to(float value, float& target) {
  target = value;
}
__device__ inline void round_to(float value, __half& target) {
  target = __float2half_rn(value);
}
__device__ inline void round_to(float value, __nv_bfloat16& target) {
  target = __float2bfloat16_rn(value);
}

/// Calls body(T{}) with the device type of float16, bfloat16 or float32.
template <class Body>
void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float16:
      return body(__half{});
    case DType::bfloat16:
      return body(__nv_bfloat16{});
    case DType::float32:
      return body(float{});
    default:
      throw InternalError("an elementwise kernel got " + std::string(name_of(dtype)) +
                          ", expected float16, bfloat16 or float32");
  }
}

}  // namespace annulus::cuda
