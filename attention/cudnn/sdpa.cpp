#include "cudnn/sdpa.hpp"

#include <cudnn.h>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/softmax_state_cuda.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>

#include "cudnn/cudnn_handle.hpp"
#include "cudnn/sdpa_backward.hpp"
#include "cudnn/sdpa_block.hpp"
#include "problem/block_checks.hpp"

namespace annulus {
namespace {

constexpr std::size_t kOldestVersion = 91200;  // strided LSE

class SdpaKernel final : public Kernel {
 public:
  SdpaKernel(const AttentionProblem& problem, Device& device)
      : problem_(problem),
        device_(device),
        blocks_(problem, device),
        workspace_(device),
        backward_(problem, device) {}

  void prepare(const AttentionBlock& block, const SoftmaxState& result) override {
    if (is_empty(block)) return;
    check(block, result);
    if (const std::string obstacle = sdpa_layout_obstacle("output", result.output);
        !obstacle.empty()) {
      throw UnsupportedError("cuDNN attention: " + obstacle);
    }
    const auto current = device_.make_current();
    (void)find(block, result);
  }

  void forward(const AttentionBlock& block, const SoftmaxState& result,
               const ExecutionContext& context) override {
    check(block, result);
    const auto current = device_.make_current();
    if (is_empty(block)) return cuda::reset(result, context.stream);
    const SdpaKept& kept = find(block, result);
    kept.plan->run(cudnn_handle(CudaStream::of(context.stream).raw()),
                   {block.query.data(), block.key.data(), block.value.data(), result.output.data(),
                    result.lse.data(), workspace_.data(), kept.lengths.at_least_one_row().data(),
                    kept.lengths.at_least_one_column().data()});
    // cuDNN's results for rows past a length are undefined, and it is given 1 for a length of 0.
    if (const ConstTensorView visible = kept.lengths.rows(); visible.data() != nullptr) {
      cuda::reset_beyond(visible, result, context.stream);
    }
  }

  void prepare_backward(const BackwardBlock& block, const Gradients& gradients) override {
    backward_.prepare(block, gradients);
  }

  void backward(const BackwardBlock& block, const Gradients& gradients,
                const ExecutionContext& context) override {
    backward_.run(block, gradients, context.stream);
  }

 private:
  void check(const AttentionBlock& block, const SoftmaxState& result) const {
    const BlockChecks checks("cuDNN attention", problem_);
    checks.check(block, result);
    checks.require(result.output.dtype() == problem_.dtype && result.lse.dtype() == DType::float32,
                   "output is not of the problem's dtype, or LSE is not float32");
  }

  const SdpaKept& find(const AttentionBlock& block, const SoftmaxState& result) {
    SdpaDescriptor shape = describe(problem_, block);
    shape.output = first_strides(result.output);
    shape.lse = first_strides(result.lse);
    const SdpaKept& kept = blocks_.find(shape, block);
    workspace_.reserve(kept.plan->workspace_bytes());
    return kept;
  }

  const AttentionProblem& problem_;
  Device& device_;
  SdpaBlocks blocks_;
  Workspace workspace_;
  SdpaBackward backward_;
};

}  // namespace

Capability sdpa_available(Place place) {
  if (cudnnGetVersion() < kOldestVersion) {
    return Capability::no(fmt::format("cuDNN {} is loaded, but {} or newer is needed",
                                      cudnnGetVersion(), kOldestVersion));
  }
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    return Capability::no(reason);
  }
  int major = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, place.device),
             "cudaDeviceGetAttribute");
  if (major < 8) return Capability::no("cuDNN attention needs compute capability 8.0");
  return Capability::yes();
}

std::unique_ptr<Kernel> make_sdpa_kernel(const AttentionProblem& problem, Device& device) {
  return std::make_unique<SdpaKernel>(problem, device);
}

}  // namespace annulus
