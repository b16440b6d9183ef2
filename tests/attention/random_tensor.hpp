#pragma once

#include <random>
#include <vector>

#include <annulus/core/convert.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>

#include "tests/attention/random_mask.hpp"

namespace annulus::test {

/// Memory for the tensors of tests; it lives as long as the program.
inline MemoryPool& test_memory() {
  static HostMemoryPool pool;
  return pool;
}

/// A contiguous tensor of the given values, rounded to `dtype`.
inline Tensor tensor_of(DType dtype, const Extents& shape, const std::vector<float>& values) {
  Tensor tensor(dtype, shape, test_memory());
  from_float32(values.data(), dtype, tensor.view().data(), shape.product());
  return tensor;
}

/// Normally distributed values of mean 0 and standard deviation `scale`, rounded to `dtype`.
inline Tensor random_tensor(Random& random, DType dtype, const Extents& shape, float scale = 1) {
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(static_cast<std::size_t>(shape.product()));
  for (float& value : values) value = normal(random);
  return tensor_of(dtype, shape, values);
}

}  // namespace annulus::test
