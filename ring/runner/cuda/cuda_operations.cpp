#include "runner/cuda/cuda_operations.hpp"

#include <annulus/attention/softmax_state_cuda.hpp>
#include <annulus/core/cuda_stream.hpp>

#include "runner/cuda/call_arguments.hpp"
#include "runner/cuda/delta.hpp"
#include "runner/cuda/sinks.hpp"
#include "runner/cuda/sum.hpp"

namespace annulus::ring {
namespace {

class CudaOperations final : public LocalOperations {
 public:
  void combine(std::span<const PartialState> parts, const SoftmaxState& result, SoftmaxForm form,
               Stream& stream) const override {
    annulus::cuda::combine(parts, result, stream, form);
  }
  void sum(std::span<const ConstTensorView> parts, const TensorView& result,
           Stream& stream) const override {
    cuda::sum(parts, result, stream);
  }
  void delta(const ConstTensorView& output, const ConstTensorView& grad_output,
             const ConstTensorView& grad_lse, const TensorView& delta,
             Stream& stream) const override {
    cuda::delta(output, grad_output, grad_lse, delta, stream);
  }
  void sink_gradient(const ConstTensorView& sinks, const ConstTensorView& lse,
                     const ConstTensorView& delta, const TensorView& grad_sinks,
                     Stream& stream) const override {
    cuda::sink_gradient(sinks, lse, delta, grad_sinks, stream);
  }
  void publish(std::int32_t value, std::int32_t* number, Stream& stream) const override {
    CudaStream::of(stream).write_word(number, static_cast<std::uint32_t>(value));
  }
  void sink_state(const ConstTensorView& sinks, const TensorView& logits, const TensorView& lse,
                  const TensorView& maximum, Stream& stream) const override {
    cuda::sink_state(sinks, logits, lse, maximum, stream);
  }
  void write(const CallArgumentWrite& write, Stream& stream) const override {
    cuda::write(write, stream);
  }
};

}  // namespace

std::unique_ptr<LocalOperations> make_cuda_operations() {
  return std::make_unique<CudaOperations>();
}

}  // namespace annulus::ring
