#pragma once

#include <memory>

#include <annulus/ring/local_operations.hpp>

namespace annulus::ring {

/// For the current CUDA device. A build without CUDA throws UnsupportedError.
[[nodiscard]] std::unique_ptr<LocalOperations> make_cuda_operations();

}  // namespace annulus::ring
