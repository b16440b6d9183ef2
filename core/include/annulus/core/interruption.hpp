#pragma once

#include <annulus/core/error.hpp>

namespace annulus {

/// The process was told to stop while it waited for another rank or a device, by Ctrl-C, say.
class InterruptedError : public LibraryError {
 public:
  using LibraryError::LibraryError;
};

/// Asked by every wait of the process that has become long, on the thread that waits, about 50
/// times a second; if it returns another number than 0, the wait ends with an InterruptedError.
/// Null, the default: nobody is asked.
void set_interruption(int (*interrupted)()) noexcept;
[[nodiscard]] bool interrupted();

}  // namespace annulus
