#pragma once

#include <cudnn.h>
#include <string>

#include <annulus/core/error.hpp>
#include <annulus/core/handle.hpp>

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

struct CudnnHandleTraits {
  using Raw = cudnnHandle_t;
  static Raw null() noexcept { return nullptr; }
  static void release(Raw raw) noexcept { (void)cudnnDestroy(raw); }
};

/// For the current device.
inline Handle<CudnnHandleTraits> make_cudnn_handle() {
  cudnnHandle_t raw = nullptr;
  check_cudnn(cudnnCreate(&raw), "cudnnCreate");
  return Handle<CudnnHandleTraits>(raw);
}

}  // namespace annulus
