#pragma once

#include <cstdint>
#include <memory>

#include <annulus/core/stream.hpp>

namespace annulus {

/// A device stream of the caller. It orders our streams with the caller's work, without a wait of
/// the host.
class ForeignStream {
 public:
  virtual ~ForeignStream() = default;
  ForeignStream() = default;
  ForeignStream(const ForeignStream&) = delete;
  ForeignStream& operator=(const ForeignStream&) = delete;

  /// Unique among all streams of this process, including ended ones.
  [[nodiscard]] virtual std::uint64_t id() const = 0;
  /// True if work submitted now is captured instead of executed.
  [[nodiscard]] virtual bool is_captured() const = 0;
  /// Expires when the graph that the stream is captured into has been destroyed, with all its
  /// instances.
  [[nodiscard]] virtual std::weak_ptr<void> captured_graph() = 0;
  /// Later work on `ours` starts after the present work of the foreign stream.
  virtual void precede(Stream& ours) = 0;
  /// Later work on the foreign stream starts after the present work of `ours`.
  virtual void follow(Stream& ours) = 0;
};

/// `raw` is a cudaStream_t of device `device`; null is CUDA's default stream. Throws
/// UnsupportedError in a build without CUDA.
[[nodiscard]] std::unique_ptr<ForeignStream> make_foreign_cuda_stream(void* raw, int device);

/// The CUDA device that is current in the calling thread. Throws UnsupportedError in a build
/// without CUDA.
[[nodiscard]] int current_cuda_device();

}  // namespace annulus
