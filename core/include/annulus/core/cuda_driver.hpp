#pragma once

// Only for sources that are compiled with CUDA.

#include <cuda.h>
#include <cudaTypedefs.h>

namespace annulus::cuda {

/// Functions of the driver that the runtime does not wrap. They are looked up at run time: if they
/// were linked, the program could not start where there is no driver.
struct DriverCalls {
  PFN_cuStreamBatchMemOp_v11070 stream_batch_mem_op = nullptr;
  PFN_cuMemGetAddressRange_v3020 mem_get_address_range = nullptr;
  PFN_cuCtxGetCurrent_v4000 ctx_get_current = nullptr;
  PFN_cuCtxRecordEvent_v12050 ctx_record_event = nullptr;
  PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encode_tiled = nullptr;
  PFN_cuGetErrorString_v6000 get_error_string = nullptr;
};

/// Throws LibraryError naming the function that the driver lacks.
[[nodiscard]] const DriverCalls& driver_calls();

/// Throws LibraryError with the call and the driver's text unless `code` is CUDA_SUCCESS.
void check_driver(CUresult code, const char* call);

}  // namespace annulus::cuda
