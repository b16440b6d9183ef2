#include "cuda/upload.hpp"

#include <annulus/core/cuda_stream.hpp>

namespace annulus {

namespace {

void copy_there(void* target, const void* source, std::size_t bytes) {
  check_cuda(cudaMemcpy(target, source, bytes, cudaMemcpyHostToDevice),
             "copying a mask to the device");
  // Copies from pageable memory may still be under way, on no stream of ours.
  check_cuda(cudaStreamSynchronize(nullptr), "copying a mask to the device");
}

}  // namespace

Tensor upload(std::span<const std::int32_t> values, MemoryPool& memory) {
  if (values.empty()) return {};
  Tensor tensor(DType::int32, {static_cast<std::int64_t>(values.size())}, memory);
  copy_there(tensor.view().data(), values.data(), values.size_bytes());
  return tensor;
}

Buffer upload(std::span<const std::int64_t> values, MemoryPool& memory) {
  if (values.empty()) return {};
  Buffer buffer = memory.allocate(values.size_bytes(), "constant arrays of a kernel");
  copy_there(buffer.data(), values.data(), values.size_bytes());
  return buffer;
}

}  // namespace annulus
