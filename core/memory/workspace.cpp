#include <array>
#include <string>

#include <annulus/core/device.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/workspace.hpp>

namespace annulus {

void Workspace::reserve(std::size_t bytes) {
  if (bytes == 0 || (!pieces_.empty() && pieces_.back()->bytes() >= bytes)) return;
  const std::array request{CallMemory::Request{device_.memory(), bytes}};
  try {
    pieces_.push_back(device_.kernel_memory().take(request).front());
  } catch (const LibraryError& error) {
    throw LibraryError(std::string("workspace of a kernel: ") + error.what());
  }
}

}  // namespace annulus
