#include "flash/flash.hpp"

#include <string>

#include <fmt/format.h>

#include <annulus/core/cuda.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>

#include "flash/backward/flash_backward.hpp"
#include "flash/flash_attention.hpp"

namespace annulus {
namespace {

class FlashKernel final : public Kernel {
 public:
  FlashKernel(const AttentionProblem& problem, Device& device)
      : attention_(problem, device), backward_(problem, device) {}

  void prepare(const AttentionBlock& block, const SoftmaxState& result) override {
    require("query", block.query);
    require("key", block.key);
    require("value", block.value);
    require("output", result.output);
    if (block.state) require("state", block.state->output);
    attention_.prepare(block);
  }

  void forward(const AttentionBlock& block, const SoftmaxState& result,
               const ExecutionContext& context) override {
    attention_.run(block, result, context.stream);
  }

  void prepare_backward(const BackwardBlock& block, const Gradients& gradients) override {
    backward_.prepare(block, gradients);
  }

  void backward(const BackwardBlock& block, const Gradients& gradients,
                const ExecutionContext& context) override {
    backward_.run(block, gradients, context.stream);
  }

 private:
  static void require(const char* name, const ConstTensorView& tensor) {
    const std::string obstacle = flash::FlashAttention::layout_obstacle(name, tensor);
    if (!obstacle.empty()) throw UnsupportedError("flash attention: " + obstacle);
  }

  flash::FlashAttention attention_;
  flash::backward::FlashBackward backward_;
};

}  // namespace

Capability flash_available(Place place) {
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    return Capability::no(reason);
  }
  int major = 0;
  int minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, place.device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, place.device),
             "cudaDeviceGetAttribute");
  if (major == 9 && minor == 0) return Capability::yes();
  return Capability::no(fmt::format(
      "the flash kernel needs a CUDA device of compute capability 9.0, not {}.{}", major, minor));
}

std::unique_ptr<Kernel> make_flash_kernel(const AttentionProblem& problem, Device& device) {
  return std::make_unique<FlashKernel>(problem, device);
}

}  // namespace annulus
