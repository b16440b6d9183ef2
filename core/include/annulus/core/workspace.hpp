#pragma once

#include <cstddef>
#include <vector>

#include <annulus/core/call_memory.hpp>

namespace annulus {

class Device;

/// Memory that a kernel needs only while it runs. Kernels of a device run one after the other, so
/// they share it.
class Workspace {
 public:
  /// `device` must outlive it.
  explicit Workspace(Device& device) noexcept : device_(device) {}
  /// Makes the workspace at least this large. Earlier memory is kept, as work under way and
  /// recordings may use it. Throws LibraryError if there is no memory.
  void reserve(std::size_t bytes);
  /// Null before anything was reserved.
  [[nodiscard]] void* data() const noexcept {
    return pieces_.empty() ? nullptr : pieces_.back()->data();
  }

 private:
  Device& device_;
  std::vector<CallMemory::Piece> pieces_;
};

}  // namespace annulus
