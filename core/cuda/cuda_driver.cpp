#include <cuda.h>
#include <string>

#include <annulus/core/cuda_driver.hpp>
#include <annulus/core/cuda_stream.hpp>

namespace annulus::cuda {
namespace {

using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
using WaitValue = WriteValue;

template <class Function>
Function driver_function(const char* name) {
  constexpr unsigned int kVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_cuda(cudaGetDriverEntryPointByVersion(name, &function, kVersion, cudaEnableDefault, &found),
             name);
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw LibraryError(std::string("the CUDA driver lacks ") + name);
  }
  return reinterpret_cast<Function>(function);
}

void check_driver(CUresult code, const char* call) {
  if (code == CUDA_SUCCESS) return;
  throw LibraryError(std::string(call) + ": CUDA driver error " + std::to_string(code));
}

CUdeviceptr device_pointer(std::uint32_t* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

}  // namespace

void write_value(cudaStream_t stream, std::uint32_t* address, std::uint32_t value) {
  static const auto function = driver_function<WriteValue>("cuStreamWriteValue32");
  check_driver(function(stream, device_pointer(address), value, CU_STREAM_WRITE_VALUE_DEFAULT),
               "cuStreamWriteValue32");
}

void wait_value(cudaStream_t stream, std::uint32_t* address, std::uint32_t value) {
  static const auto function = driver_function<WaitValue>("cuStreamWaitValue32");
  check_driver(function(stream, device_pointer(address), value, CU_STREAM_WAIT_VALUE_EQ),
               "cuStreamWaitValue32");
}

}  // namespace annulus::cuda
