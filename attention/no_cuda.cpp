#include <string>
#include <utility>
#include <vector>

#include <annulus/core/error.hpp>

#include "cuda_implementations.hpp"

namespace annulus {
namespace {

class AbsentImplementation final : public Implementation {
 public:
  AbsentImplementation(std::vector<std::string> names, const std::string& what)
      : names_(std::move(names)), what_(what + " needs a build with CUDA") {}

  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }
  [[nodiscard]] Capability capability(const AttentionProblem& /*problem*/,
                                      Place /*place*/) const override {
    return Capability::no(error().what());
  }
  void forward(const AttentionProblem& /*problem*/, const AttentionBlock& /*block*/,
               const SoftmaxState& /*result*/, const ExecutionContext& /*context*/) const override {
    throw error();
  }

 private:
  [[nodiscard]] NotAvailableError error() const { return NotAvailableError(what_); }

  std::vector<std::string> names_;
  std::string what_;
};

}  // namespace

std::unique_ptr<Implementation> make_sdpa_implementation() {
  return std::make_unique<AbsentImplementation>(
      std::vector<std::string>{"sdpa", "cudnn", "cuda_flash_attn2"}, "cuDNN attention");
}

std::unique_ptr<Implementation> make_flash_implementation() {
  return std::make_unique<AbsentImplementation>(std::vector<std::string>{"flash_attn2"},
                                                "the flash kernel");
}

std::unique_ptr<Implementation> make_blocksparse_implementation() {
  return std::make_unique<AbsentImplementation>(std::vector<std::string>{"blocksparse"},
                                                "the block-sparse kernel");
}

}  // namespace annulus
