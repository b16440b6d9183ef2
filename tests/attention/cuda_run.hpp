#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <annulus/core/cuda_stream.hpp>

#include "tests/attention/native_run.hpp"
#include "tests/support/cuda_test.hpp"

namespace annulus::test {

/// The memory of a host tensor on the device; views of the one become views of the other.
class Mirror {
 public:
  Mirror(const Tensor& host, Device& device)
      : host_(host), device_(host.dtype(), host.shape(), device.memory()) {
    if (host.bytes() == 0) return;
    check_cuda(
        cudaMemcpy(device_.view().data(), host.view().data(), host.bytes(), cudaMemcpyHostToDevice),
        "upload");
    check_cuda(cudaDeviceSynchronize(), "upload");
  }

  [[nodiscard]] TensorView at(const ConstTensorView& view) const {
    return same_view(view, host_, device_);
  }
  [[nodiscard]] TensorView view() const { return device_.view(); }

  /// Overwrites the host tensor. The stream's work must have finished.
  void download() const {
    if (host_.bytes() == 0) return;
    check_cuda(cudaMemcpy(host_.view().data(), device_.view().data(), host_.bytes(),
                          cudaMemcpyDeviceToHost),
               "download");
  }

 private:
  const Tensor& host_;
  Tensor device_;
};

/// The host tensors that a block's views lie in.
struct Sources {
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const Tensor* bias = nullptr;
  const Tensor* mask = nullptr;
};

/// A block of host tensors run on the device. The result comes back in host memory, the output as
/// float32 whatever dtype the kernel hands it over in, and `maximum` [b,n,t] if it is given.
inline Result run_on_device(const Implementation& implementation, const AttentionProblem& problem,
                            const AttentionBlock& host_block, const Sources& sources,
                            Device& device, Stream& stream, DType lse_dtype = DType::float32,
                            const Tensor* maximum = nullptr) {
  const Mirror query(sources.query, device);
  const Mirror key(sources.key, device);
  const Mirror value(sources.value, device);
  AttentionBlock block = host_block;
  block.query = query.at(block.query);
  block.key = key.at(block.key);
  block.value = value.at(block.value);
  std::optional<Mirror> bias;
  std::optional<Mirror> mask;
  if (sources.bias != nullptr && block.scores.bias) {
    block.scores.bias = bias.emplace(*sources.bias, device).at(*block.scores.bias);
  }
  if (sources.mask != nullptr && block.scores.mask) {
    block.scores.mask = mask.emplace(*sources.mask, device).at(*block.scores.mask);
  }
  Result result(host_block, lse_dtype);
  const std::unique_ptr<Kernel> kernel = implementation.make_kernel(problem, device);
  const DType dtype =
      implementation.declares().results == ResultForm::rounded ? problem.dtype : DType::float32;
  const Tensor output(dtype, result.output.shape(), test_memory());
  std::memset(output.view().data(), 0xff, output.bytes());  // NaN
  const Mirror output_mirror(output, device);
  const Mirror lse_mirror(result.lse, device);
  std::optional<Mirror> maximum_mirror;
  SoftmaxState state{output_mirror.view(), lse_mirror.view()};
  if (maximum != nullptr) state.maximum = maximum_mirror.emplace(*maximum, device).view();
  kernel->prepare(block, state);
  kernel->forward(block, state, {stream, nullptr, 1});
  stream.synchronize();
  output_mirror.download();
  lse_mirror.download();
  if (maximum_mirror) maximum_mirror->download();
  to_float32(output.view().data(), dtype, result.output.view().as<float>(),
             output.view().elements());
  return result;
}

inline Result run_on_device(const Implementation& implementation, const WholeAttention& whole,
                            Device& device, Stream& stream, DType lse_dtype = DType::float32) {
  return run_on_device(implementation, whole.problem, whole.block(),
                       {whole.query, whole.key, whole.value, &whole.bias, &whole.mask}, device,
                       stream, lse_dtype);
}

/// The expected result of a part of the columns: that of the CPU's kernel, which native_test
/// compares
/// with the oracle.
inline OracleOutput reference_of(const AttentionProblem& problem, const AttentionBlock& block) {
  const Result result = run_native(problem, block, 2);
  const auto* output = result.output.view().as<float>();
  const auto* lse = result.lse.view().as<float>();
  return {std::vector<double>(output, output + result.output.shape().product()),
          std::vector<double>(lse, lse + result.lse.shape().product())};
}

/// The memory of a view, gaps included, on the device.
class ViewMirror {
 public:
  ViewMirror(const ConstTensorView& host, Device& device)
      : host_(host), device_(DType::uint8, {span_of(host)}, device.memory()) {
    copy(device_.view().data(), host.data(), cudaMemcpyHostToDevice);
  }

  [[nodiscard]] TensorView view() const {
    return {device_.view().data(), host_.dtype(), host_.shape(), host_.strides(),
            device_.view().place()};
  }
  /// Overwrites the memory of `host`, the view that this is a mirror of.
  void download(const TensorView& host) const {
    copy(host.data(), device_.view().data(), cudaMemcpyDeviceToHost);
  }

 private:
  static std::int64_t span_of(const ConstTensorView& view) {
    if (view.elements() == 0) return 0;
    std::int64_t last = 0;
    for (int dim = 0; dim < view.rank(); ++dim) last += (view.size(dim) - 1) * view.stride(dim);
    return (last + 1) * static_cast<std::int64_t>(size_of(view.dtype()));
  }
  void copy(void* target, const void* source, cudaMemcpyKind kind) const {
    if (device_.bytes() == 0) return;
    check_cuda(cudaMemcpy(target, source, device_.bytes(), kind), "copying a view");
    check_cuda(cudaDeviceSynchronize(), "copying a view");
  }

  ConstTensorView host_;
  Tensor device_;
};

}  // namespace annulus::test
