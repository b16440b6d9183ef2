#pragma once

#include <string>

#include <annulus/core/error.hpp>

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

}  // namespace annulus::verification
