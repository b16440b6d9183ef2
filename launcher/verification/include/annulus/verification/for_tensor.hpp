#pragma once

#include <string>

#include <annulus/core/error.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::verification {

/// Runs body() and makes its failure, such as a lack of memory, name the tensor and its shape.
template <class Body>
auto for_tensor(const std::string& name, const Extents& shape, const Body& body) {
  try {
    return body();
  } catch (const LibraryError& error) {
    throw LibraryError(name + " " + to_string(shape) + ": " + error.what());
  }
}

}  // namespace annulus::verification
