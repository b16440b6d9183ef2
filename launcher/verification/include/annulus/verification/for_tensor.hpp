#pragma once

#include <string>

#include <annulus/core/error.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::verification {

/// Runs body() and makes its failure, such as a lack of memory, name the tensor.
template <class Body>
auto for_tensor(const std::string& name, const Body& body) {
  try {
    return body();
  } catch (const LibraryError& error) {
    throw LibraryError(name + ": " + error.what());
  }
}

/// A tensor that is still to be filled. If memory runs out, the error names it.
[[nodiscard]] inline Tensor unfilled(const std::string& name, DType dtype, const Extents& shape,
                                     MemoryPool& memory) {
  return for_tensor(name, [&] { return Tensor(dtype, shape, memory); });
}

}  // namespace annulus::verification
