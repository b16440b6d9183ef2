#include "cudnn/sdpa_backward.hpp"

#include <string>
#include <utility>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>

#include "cudnn/cudnn_handle.hpp"
#include "problem/block_checks.hpp"

namespace annulus {
namespace {

constexpr std::size_t kPartBytes = 256;  // parts of the workspace begin at multiples of it

bool is_wanted(const TensorView& gradient) {
  return gradient.shape().rank() > 0;
}

}  // namespace

void SdpaBackward::prepare(const BackwardBlock& block, const Gradients& gradients) {
  check(block, gradients);
  const AttentionBlock forward = forward_of(block);
  if (is_empty(forward)) return;
  const std::string obstacle = sdpa_layout_obstacle("the output's gradient", block.grad_output);
  if (!obstacle.empty()) throw UnsupportedError("cuDNN attention, backward: " + obstacle);
  const auto current = device_.make_current();
  (void)find(forward);
}

void SdpaBackward::run(const BackwardBlock& block, const Gradients& gradients, Stream& stream) {
  check(block, gradients);
  const AttentionBlock forward = forward_of(block);
  if (is_empty(forward)) return;
  const auto current = device_.make_current();
  const SdpaKept& kept = find(forward);
  const Parts parts = parts_of(forward, workspace_.data());
  cuda::make_sdpa_rows(block.grad_output, block.lse, block.delta, parts.rows, stream);
  SdpaPlan::Arguments arguments{block.query.data(),
                                block.key.data(),
                                block.value.data(),
                                parts.rows.output.data(),
                                parts.rows.lse.data(),
                                static_cast<std::byte*>(workspace_.data()) + parts.bytes,
                                kept.lengths.at_least_one_row().data(),
                                kept.lengths.at_least_one_column().data()};
  arguments.grad_output = parts.rows.grad_output.data();
  arguments.grad_query = parts.query.data();
  arguments.grad_key = parts.key.data();
  arguments.grad_value = parts.value.data();
  kept.plan->run(cudnn_handle(CudaStream::of(stream).raw()), arguments);
  const auto add = [&](const TensorView& part, const ConstTensorView& lengths,
                       const TensorView& sum) {
    if (is_wanted(sum)) cuda::add_rounded(part, lengths, sum, stream);
  };
  add(parts.query, kept.lengths.rows(), gradients.query);
  add(parts.key, kept.lengths.columns(), gradients.key);
  add(parts.value, kept.lengths.columns(), gradients.value);
}

void SdpaBackward::check(const BackwardBlock& block, const Gradients& gradients) const {
  const BlockChecks checks("cuDNN attention, backward", problem_);
  checks.check(block, gradients);
  checks.require(!is_wanted(gradients.bias), "the gradient of a bias is not computed");
}

const SdpaKept& SdpaBackward::find(const AttentionBlock& block) {
  SdpaDescriptor shape = describe(problem_, block);
  shape.backward = true;
  const SdpaKept& kept = blocks_.find(shape, block);
  workspace_.reserve(parts_of(block, nullptr).bytes + kept.plan->workspace_bytes());
  return kept;
}

SdpaBackward::Parts SdpaBackward::parts_of(const AttentionBlock& block, void* base) const {
  Parts parts;
  const auto part = [&](DType dtype, const Extents& shape) {
    const auto address = reinterpret_cast<std::uintptr_t>(base) + parts.bytes;
    const TensorView view(reinterpret_cast<void*>(address), dtype, shape, device_.place());
    const std::size_t bytes = static_cast<std::size_t>(shape.product()) * size_of(dtype);
    parts.bytes += (bytes + kPartBytes - 1) / kPartBytes * kPartBytes;
    return view;
  };
  const Extents& query = block.query.shape();
  const Extents outputs{query[0], query[1], query[2], block.value.size(3)};
  parts.rows.output = part(problem_.dtype, outputs);
  parts.rows.grad_output = part(problem_.dtype, outputs);
  parts.rows.lse = part(DType::float32, {query[0], query[2], query[1]});
  parts.query = part(problem_.dtype, query);
  parts.key = part(problem_.dtype, block.key.shape());
  parts.value = part(problem_.dtype, block.value.shape());
  return parts;
}

}  // namespace annulus
