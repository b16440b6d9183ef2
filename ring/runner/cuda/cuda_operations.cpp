#include "runner/cuda/cuda_operations.hpp"

#include <annulus/attention/softmax_state_cuda.hpp>

#include "runner/cuda/sum.hpp"

namespace annulus::ring {
namespace {

class CudaOperations final : public LocalOperations {
 public:
  void combine(std::span<const PartialState> parts, const SoftmaxState& result,
               Stream& stream) const override {
    annulus::cuda::combine(parts, result, stream);
  }
  void sum(std::span<const ConstTensorView> parts, const TensorView& result,
           Stream& stream) const override {
    cuda::sum(parts, result, stream);
  }
  void copy(const ConstTensorView& source, const TensorView& destination,
            Stream& stream) const override {
    annulus::cuda::copy(source, destination, stream);
  }
};

}  // namespace

std::unique_ptr<LocalOperations> make_cuda_operations() {
  return std::make_unique<CudaOperations>();
}

}  // namespace annulus::ring
