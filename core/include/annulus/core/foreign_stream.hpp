#pragma once

#include <cstdint>
#include <memory>

#include <annulus/core/stream.hpp>

namespace annulus {

/// A device stream that somebody else owns, against which ours are ordered. The host waits for
/// nothing.
class ForeignStream {
 public:
  virtual ~ForeignStream() = default;
  ForeignStream() = default;
  ForeignStream(const ForeignStream&) = delete;
  ForeignStream& operator=(const ForeignStream&) = delete;

  /// Differs from that of every other stream of this process, ended ones included.
  [[nodiscard]] virtual std::uint64_t id() const = 0;
  /// True if work submitted now is captured instead of executed.
  [[nodiscard]] virtual bool is_captured() const = 0;
  /// Expires when the graph into which the stream is captured has been destroyed, with all that was
  /// instantiated from it.
  [[nodiscard]] virtual std::weak_ptr<void> captured_graph() = 0;
  /// Work submitted to `ours` from now on starts after the work that is on the foreign stream now.
  virtual void precede(Stream& ours) = 0;
  /// Work put on the foreign stream from now on starts after the work that `ours` has now.
  virtual void follow(Stream& ours) = 0;
};

/// `raw` is a cudaStream_t of device `device`; null is CUDA's default stream. Throws
/// UnsupportedError in a build without CUDA.
[[nodiscard]] std::unique_ptr<ForeignStream> make_foreign_cuda_stream(void* raw, int device);

/// The CUDA device that is current in the calling thread. Throws UnsupportedError in a build
/// without CUDA.
[[nodiscard]] int current_cuda_device();

}  // namespace annulus
