#include "cuda/cuda_operations.hpp"

#include <annulus/attention/softmax_state_cuda.hpp>

namespace annulus::ring {
namespace {

class CudaOperations final : public LocalOperations {
 public:
  void reset(const SoftmaxState& state, Stream& stream) const override {
    cuda::reset(state, stream);
  }
  void merge(const SoftmaxState& state, const SoftmaxState& partial,
             Stream& stream) const override {
    cuda::merge(state, partial, stream);
  }
  void round_output(const SoftmaxState& state, const TensorView& output,
                    Stream& stream) const override {
    cuda::round_output(state, output, stream);
  }
  void round_lse(const SoftmaxState& state, const TensorView& lse, Stream& stream) const override {
    cuda::copy(state.lse, lse, stream);  // float32 already
  }
  void copy(const ConstTensorView& source, const TensorView& destination,
            Stream& stream) const override {
    cuda::copy(source, destination, stream);
  }
};

}  // namespace

std::unique_ptr<LocalOperations> make_cuda_operations() {
  return std::make_unique<CudaOperations>();
}

}  // namespace annulus::ring
