#pragma once

#include <functional>
#include <memory>
#include <utility>

#include <gtest/gtest.h>

#include <annulus/attention/implementation.hpp>
#include <annulus/verification/verification.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tests/support/host_context.hpp"

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

/// A problem to verify with spoiled kernels.
class SpoiledVerification : public ::testing::Test {
 protected:
  SpoiledVerification() : context_(test::session().world(), test::on_host()) {
    case_.problem.shape = {2, 40, 40, 4, 2, 8, 8};
    case_.layout.query = case_.layout.kv = PartitionSpec::parse("-,sp");
    case_.schedule = "ring";
    case_.seed = 4;
  }

  Verification verify_spoiled(const SpoilResult& result, const SpoilGradients& gradients) {
    context_.registry() = Registry();
    test::add_native(context_.registry(), "spoiled", 1, [=](std::unique_ptr<Kernel> native) {
      return std::make_unique<SpoiledKernel>(std::move(native), result, gradients);
    });
    return verify_sharded(case_, context_);
  }
  Verification verify() { return verify_spoiled({}, {}); }

  [[nodiscard]] bool alone() const { return context_.size() == 1; }

  /// Calls visit(element, batch, dimension) for all elements of a tensor [B,T,N,D].
  static void for_all(const auto& tensor, const auto& visit) {
    const Extents& shape = tensor.shape();
    for (std::int64_t b = 0; b < shape[0]; ++b) {
      for (std::int64_t t = 0; t < shape[1]; ++t) {
        for (std::int64_t n = 0; n < shape[2]; ++n) {
          for (std::int64_t d = 0; d < shape[3]; ++d) {
            visit(tensor.template at<float>({b, t, n, d}), b, d);
          }
        }
      }
    }
  }

  Context context_;
  ShardedCase case_;
};

}  // namespace annulus::verification
