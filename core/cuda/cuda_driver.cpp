#include <cuda_runtime_api.h>

#include <fmt/format.h>

#include <annulus/core/cuda_driver.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>

namespace annulus::cuda {
namespace {

// `version`: the CUDA version in which the function got the signature of `call`.
template <class Call>
void look_up(const char* name, unsigned version, Call& call) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check_cuda(cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess || address == nullptr) {
    throw LibraryError(fmt::format("the CUDA driver lacks {}, which CUDA {}.{} and later have",
                                   name, version / 1000, version % 1000 / 10));
  }
  call = reinterpret_cast<Call>(address);
}

DriverCalls look_up_all() {
  DriverCalls calls;
  look_up("cuStreamBatchMemOp", 11070, calls.stream_batch_mem_op);
  look_up("cuMemGetAddressRange", 3020, calls.mem_get_address_range);
  look_up("cuCtxGetCurrent", 4000, calls.ctx_get_current);
  look_up("cuCtxRecordEvent", 12050, calls.ctx_record_event);
  look_up("cuTensorMapEncodeTiled", 12000, calls.tensor_map_encode_tiled);
  look_up("cuGetErrorString", 6000, calls.get_error_string);
  return calls;
}

}  // namespace

const DriverCalls& driver_calls() {
  static const DriverCalls calls = look_up_all();
  return calls;
}

void check_driver(CUresult code, const char* call) {
  if (code == CUDA_SUCCESS) return;
  const char* text = nullptr;
  (void)driver_calls().get_error_string(code, &text);
  throw LibraryError(
      fmt::format("{}: {} ({})", call, text == nullptr ? "unknown error" : text, int{code}));
}

}  // namespace annulus::cuda
