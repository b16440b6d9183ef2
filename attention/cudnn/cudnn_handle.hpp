#pragma once

#include <cudnn.h>
#include <string>

#include <annulus/core/error.hpp>

namespace annulus {

/// A cuDNN call returned an error; the message has the call and cuDNN's own text.
class CudnnError : public LibraryError {
 public:
  using LibraryError::LibraryError;
};

inline void check_cudnn(cudnnStatus_t status, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw CudnnError(std::string(call) + ": " + cudnnGetErrorString(status));
}

/// Returns the calling thread's handle for the current device. The handle works on `stream` from
/// now on. Making a handle takes long, and a handle serves one thread at a time, so the handle of a
/// thread that has ended serves a later thread. No handle is destroyed, since CUDA may be gone when
/// the process ends.
[[nodiscard]] cudnnHandle_t cudnn_handle(cudaStream_t stream);

}  // namespace annulus
