#include "peer/stream_operations.hpp"

#include <annulus/core/cuda_driver.hpp>

#include "peer/flags.hpp"

namespace annulus::peer {

CUstreamBatchMemOpParams& StreamOperations::next() {
  if (count_ == operations_.size()) submit();
  CUstreamBatchMemOpParams& operation = operations_[count_++];
  operation = {};
  return operation;
}

// NOLINTNEXTLINE(readability-non-const-parameter): the device writes
void StreamOperations::write(std::uint32_t* flag, std::uint32_t value) {
  auto& operation = next().writeValue;
  operation.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.address = reinterpret_cast<CUdeviceptr>(flag);
  operation.value = value;
  operation.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // with its fence
}

void StreamOperations::wait_and_lower(std::uint32_t* flag) {
  auto& operation = next().waitValue;
  operation.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operation.address = reinterpret_cast<CUdeviceptr>(flag);
  operation.value = kRaised;
  operation.flags = CU_STREAM_WAIT_VALUE_EQ;
  write(flag, 0);
}

void StreamOperations::submit() {
  if (count_ == 0) return;
  cuda::check_driver(cuda::driver_calls().stream_batch_mem_op(
                         stream_, static_cast<unsigned>(count_), operations_.data(), 0),
                     "cuStreamBatchMemOp (can the device wait for memory?)");
  count_ = 0;
}

}  // namespace annulus::peer
