#pragma once

#include <functional>
#include <memory>
#include <utility>

#include <annulus/attention/implementation.hpp>

namespace annulus::verification {

using SpoilResult = std::function<void(const AttentionBlock& block, const SoftmaxState& result)>;
using SpoilGradients = std::function<void(const BackwardBlock& block, const Gradients& gradients)>;

/// Spoils the results of another kernel, or its gradients; an empty function leaves them.
class SpoiledKernel final : public Kernel {
 public:
  SpoiledKernel(std::unique_ptr<Kernel> kernel, SpoilResult result, SpoilGradients gradients = {})
      : kernel_(std::move(kernel)),
        spoil_result_(std::move(result)),
        spoil_gradients_(std::move(gradients)) {}
  void forward(const AttentionBlock& block, const SoftmaxState& result,
               const ExecutionContext& context) override {
    kernel_->forward(block, result, context);
    if (spoil_result_ && result.lse.elements() > 0) spoil_result_(block, result);
  }
  void backward(const BackwardBlock& block, const Gradients& gradients,
                const ExecutionContext& context) override {
    kernel_->backward(block, gradients, context);
    if (spoil_gradients_) spoil_gradients_(block, gradients);
  }

 private:
  std::unique_ptr<Kernel> kernel_;
  SpoilResult spoil_result_;
  SpoilGradients spoil_gradients_;
};

}  // namespace annulus::verification
