#include "cuda/upload.hpp"

#include <annulus/core/cuda_stream.hpp>

namespace annulus {

Tensor upload(std::span<const std::int32_t> values, MemoryPool& memory) {
  if (values.empty()) return {};
  Tensor tensor(DType::int32, {static_cast<std::int64_t>(values.size())}, memory);
  check_cuda(
      cudaMemcpy(tensor.view().data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice),
      "copying a mask to the device");
  // Copies from pageable memory may still be under way, on no stream of ours.
  check_cuda(cudaStreamSynchronize(nullptr), "copying a mask to the device");
  return tensor;
}

}  // namespace annulus
