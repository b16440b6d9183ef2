#include "peer/stream_operations.hpp"

#include <annulus/core/cuda_driver.hpp>

namespace annulus::peer {

CUstreamBatchMemOpParams& StreamOperations::next() {
  if (count_ == operations_.size()) submit();
  CUstreamBatchMemOpParams& operation = operations_[count_++];
  operation = {};
  return operation;
}

// NOLINTNEXTLINE(readability-non-const-parameter): the device writes
void StreamOperations::write(std::uint32_t* word, std::uint32_t value) {
  auto& operation = next().writeValue;
  operation.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.address = reinterpret_cast<CUdeviceptr>(word);
  operation.value = value;
  operation.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // with its fence
}

void StreamOperations::raise(FlagWords* flag) {
  write(&flag->raised, 1);
}

void StreamOperations::wait_and_lower(FlagWords* flag) {
  auto& operation = next().waitValue;
  operation.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
  operation.address = reinterpret_cast<CUdeviceptr>(flag);
  operation.value64 = 1;
  operation.flags = CU_STREAM_WAIT_VALUE_GEQ;
  write(&flag->raised, 0);
}

void StreamOperations::abandon(FlagWords* flag) {
  write(&flag->abandoned, 1);
}

void StreamOperations::submit() {
  if (count_ == 0) return;
  cuda::check_driver(cuda::driver_calls().stream_batch_mem_op(
                         stream_, static_cast<unsigned>(count_), operations_.data(), 0),
                     "cuStreamBatchMemOp (can the device wait for memory?)");
  count_ = 0;
}

}  // namespace annulus::peer
