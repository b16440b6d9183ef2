#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <annulus/core/device.hpp>

#include "tests/attention/native_run.hpp"

/// Blocks of host tensors, computed on any device. Results come back to host memory.
namespace annulus::test {

/// Copies of host views on a device, gaps and strides included.
class Mirrors {
 public:
  Mirrors(Device& device, Stream& stream) : device_(device), stream_(stream) {}

  TensorView upload(const ConstTensorView& host) {
    const Tensor& copy =
        tensors_.emplace_back(DType::uint8, Extents{span_of(host)}, device_.memory());
    if (copy.bytes() > 0) {
      device_.copy(ConstTensorView(host.data(), DType::uint8, copy.shape()), copy.view(), stream_);
    }
    return {copy.view().data(), host.dtype(), host.shape(), host.strides(), device_.place()};
  }
  /// The same for a view that download() overwrites. A view without dimensions stays so.
  TensorView result(const TensorView& host) {
    if (host.rank() == 0) return {};
    const TensorView there = upload(host);
    results_.emplace_back(host, tensors_.size() - 1);
    return there;
  }
  void download() {
    for (const auto& [host, index] : results_) {
      const Tensor& copy = tensors_[index];
      if (copy.bytes() == 0) continue;
      device_.copy(copy.view(), TensorView(host.data(), DType::uint8, copy.shape()), stream_);
    }
    stream_.synchronize();
  }

 private:
  static std::int64_t span_of(const ConstTensorView& view) {
    if (view.elements() == 0) return 0;
    std::int64_t last = 0;
    for (int dim = 0; dim < view.rank(); ++dim) last += (view.size(dim) - 1) * view.stride(dim);
    return (last + 1) * static_cast<std::int64_t>(size_of(view.dtype()));
  }

  Device& device_;
  Stream& stream_;
  std::vector<Tensor> tensors_;
  std::vector<std::pair<TensorView, std::size_t>> results_;
};

inline void upload_scores(Mirrors& mirrors, ScoreTensors& scores) {
  if (scores.bias) scores.bias = mirrors.upload(*scores.bias);
  if (scores.mask) scores.mask = mirrors.upload(*scores.mask);
}

inline AttentionBlock upload_operands(Mirrors& mirrors, AttentionBlock block) {
  for (ConstTensorView* view : {&block.query, &block.key, &block.value}) {
    *view = mirrors.upload(*view);
  }
  upload_scores(mirrors, block.scores);
  return block;
}

/// Calls run(block, result) with copies on the device. `host` is the result; its old contents reach
/// the device, too. The block's state may share its memory.
template <class Run>
void compute_on(Device& device, Stream& stream, const AttentionBlock& on_host,
                const SoftmaxState& host, const Run& run) {
  Mirrors mirrors(device, stream);
  AttentionBlock block = upload_operands(mirrors, on_host);
  const SoftmaxState there{mirrors.result(host.output), mirrors.result(host.lse),
                           mirrors.result(host.maximum)};
  if (block.state) {
    const auto shared = [&](const TensorView& of_state, const TensorView& of_host,
                            const TensorView& of_device) {
      return of_state.data() == of_host.data() ? of_device : mirrors.upload(of_state);
    };
    block.state = SoftmaxState{shared(block.state->output, host.output, there.output),
                               shared(block.state->lse, host.lse, there.lse)};
  }
  run(block, there);
  mirrors.download();
}

inline void forward_on(Device& device, Stream& stream, Kernel& kernel, const AttentionBlock& block,
                       const SoftmaxState& host, int threads = 1) {
  compute_on(device, stream, block, host,
             [&](const AttentionBlock& there, const SoftmaxState& result) {
               kernel.prepare(there, result);
               kernel.forward(there, result, {stream, nullptr, threads});
             });
}

/// Computes the columns in parts (begin, count). Each part continues the state of earlier parts.
/// `run` computes a part on the stream. The last part writes its output in dtype `last` to memory
/// of its own; without `last`, to the state.
inline Result in_parts(Device& device, Stream& stream, const WholeAttention& whole,
                       const std::vector<std::pair<std::int64_t, std::int64_t>>& parts,
                       std::optional<DType> last,
                       const std::function<void(AttentionBlock&, const SoftmaxState&)>& run) {
  Mirrors mirrors(device, stream);
  const AttentionBlock all = upload_operands(mirrors, whole.block());
  Result result(whole.block(), DType::float64);
  const Tensor output(last.value_or(DType::float32), result.output.shape(), test_memory());
  const SoftmaxState state{mirrors.result(result.output.view()), mirrors.result(result.lse.view())};
  const SoftmaxState end{last ? mirrors.result(output.view()) : state.output, state.lse};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [begin, count] = parts[i];
    AttentionBlock block = all;
    block.key = all.key.slice(1, begin, count);
    block.value = all.value.slice(1, begin, count);
    block.columns = all.columns.slice({LocalPosition(begin), count});
    if (i > 0) block.state = state;
    run(block, i + 1 < parts.size() ? state : end);
  }
  mirrors.download();
  if (last) {
    to_float32(output.view().data(), *last, result.output.view().as<float>(),
               output.view().elements());
  }
  return result;
}

/// Adds to gradients in host memory.
inline void backward_on(Device& device, Stream& stream, Kernel& kernel, BackwardBlock block,
                        const Gradients& host, int threads = 1) {
  Mirrors mirrors(device, stream);
  for (ConstTensorView* view :
       {&block.query, &block.key, &block.value, &block.grad_output, &block.lse, &block.delta}) {
    *view = mirrors.upload(*view);
  }
  upload_scores(mirrors, block.scores);
  const Gradients sums{mirrors.result(host.query), mirrors.result(host.key),
                       mirrors.result(host.value), mirrors.result(host.bias)};
  kernel.prepare_backward(block, sums);
  kernel.backward(block, sums, {stream, nullptr, threads});
  mirrors.download();
}

/// The result of a kernel that hands its output over in `dtype`; it comes as float32. `maximum`
/// [b,n,t] is written if it is given.
inline Result result_on(Device& device, Stream& stream, Kernel& kernel, DType dtype,
                        const AttentionBlock& block, DType lse_dtype = DType::float32,
                        const Tensor* maximum = nullptr, int threads = 1) {
  Result result(block, lse_dtype);
  SoftmaxState state = result.state();
  if (maximum != nullptr) state.maximum = maximum->view();
  const Tensor output(dtype, result.output.shape(), test_memory());
  std::memset(output.view().data(), 0xff, output.bytes());  // NaN
  state.output = output.view();
  forward_on(device, stream, kernel, block, state, threads);
  to_float32(output.view().data(), dtype, result.output.view().as<float>(),
             output.view().elements());
  return result;
}

/// The same with a kernel of `implementation`.
inline Result run_on_device(const Implementation& implementation, const AttentionProblem& problem,
                            const AttentionBlock& block, Device& device, Stream& stream,
                            DType lse_dtype = DType::float32, const Tensor* maximum = nullptr) {
  const std::unique_ptr<Kernel> kernel = implementation.make_kernel(problem, device);
  const DType dtype =
      implementation.declares().results == ResultForm::rounded ? problem.dtype : DType::float32;
  return result_on(device, stream, *kernel, dtype, block, lse_dtype, maximum);
}

inline Result run_on_device(const Implementation& implementation, const WholeAttention& whole,
                            Device& device, Stream& stream, DType lse_dtype = DType::float32) {
  return run_on_device(implementation, whole.problem, whole.block(), device, stream, lse_dtype);
}

}  // namespace annulus::test
