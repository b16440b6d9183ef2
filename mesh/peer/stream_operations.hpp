#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "peer/flags.hpp"

namespace annulus::peer {

/// Collects writes to and waits for flags, and submits them to a stream in as few calls as
/// possible. Allocates nothing. Operations run in order, after earlier work of the stream.
class StreamOperations {
 public:
  explicit StreamOperations(cudaStream_t stream) : stream_(stream) {}

  /// Raises the flag once all earlier work of the stream is visible to all devices.
  void raise(FlagWords* flag);
  /// Waits until the flag is up or abandoned, then lowers it.
  void wait_and_lower(FlagWords* flag);
  /// Lets all waits for the flag pass, from now on.
  void abandon(FlagWords* flag);
  /// Submits the collected operations; throws LibraryError.
  void submit();

 private:
  CUstreamBatchMemOpParams& next();
  void write(std::uint32_t* word, std::uint32_t value);

  cudaStream_t stream_;
  std::array<CUstreamBatchMemOpParams, 64> operations_{};  // the driver takes up to 255 at once
  std::size_t count_ = 0;
};

}  // namespace annulus::peer
