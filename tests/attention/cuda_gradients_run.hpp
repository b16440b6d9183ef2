#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tests/attention/cuda_run.hpp"
#include "tests/attention/gradients_run.hpp"

namespace annulus::test {

/// A block of a problem and the gradients that it adds to, all of them views of the host's tensors.
struct GradientPart {
  BackwardBlock block;
  Gradients gradients;
};

/// One kernel of the device adds the gradients of all parts to gradients in host memory.
inline void add_on_device(const Implementation& implementation, const WholeGradients& whole,
                          const std::vector<GradientPart>& parts, Device& device, Stream& stream) {
  const AttentionProblem& problem = whole.forward.problem;
  ASSERT_EQ(implementation.fits_backward(problem, device.place()).reason(), "");
  const Mirror query(whole.forward.query, device), key(whole.forward.key, device);
  const Mirror value(whole.forward.value, device), grad_output(whole.grad_output, device);
  const Mirror lse(whole.lse, device), delta(whole.delta, device);
  const Mirror grad_query(whole.query, device), grad_key(whole.key, device);
  const Mirror grad_value(whole.value, device);
  std::optional<Mirror> bias, grad_bias, mask;
  if (problem.bias) bias.emplace(whole.forward.bias, device);
  if (problem.bias) grad_bias.emplace(whole.bias, device);
  if (problem.dense_mask) mask.emplace(whole.forward.mask, device);
  const std::unique_ptr<Kernel> kernel = implementation.make_kernel(problem, device);
  for (const GradientPart& part : parts) {
    ASSERT_EQ(implementation.takes_backward(problem, geometry_of(forward_of(part.block))).reason(),
              "");
    BackwardBlock block = part.block;
    block.query = query.at(block.query);
    block.key = key.at(block.key);
    block.value = value.at(block.value);
    block.grad_output = grad_output.at(block.grad_output);
    block.lse = lse.at(block.lse);
    block.delta = delta.at(block.delta);
    if (block.scores.bias) block.scores.bias = bias->at(*block.scores.bias);
    if (block.scores.mask) block.scores.mask = mask->at(*block.scores.mask);
    const auto there = [](const TensorView& view, const Mirror& mirror) {
      return view.shape().rank() == 0 ? TensorView() : mirror.at(view);
    };
    Gradients gradients{there(part.gradients.query, grad_query),
                        there(part.gradients.key, grad_key),
                        there(part.gradients.value, grad_value)};
    if (grad_bias) gradients.bias = there(part.gradients.bias, *grad_bias);
    kernel->prepare_backward(block, gradients);
    const std::size_t calls = device.memory().statistics().system_calls;
    kernel->backward(block, gradients, {stream, nullptr, 1});
    EXPECT_EQ(device.memory().statistics().system_calls, calls) << "allocated in a prepared call";
  }
  stream.synchronize();
  grad_query.download();
  grad_key.download();
  grad_value.download();
  if (grad_bias) grad_bias->download();
}

/// Positions first, first + step, …
struct PositionRun {
  std::int64_t first, count, step = 1;
};

/// The block of these rows and columns of one batch.
inline GradientPart part_of(const WholeGradients& whole, std::int64_t batch,
                            const PositionRun& rows, const PositionRun& columns) {
  const BackwardBlock all = whole.block();
  const Gradients sums = whole.gradients();
  const auto slice = [batch](const auto& view, int dim, const PositionRun& run) {
    auto strides = view.strides();
    auto shape = view.shape();
    strides[dim] *= run.step;
    shape[dim] = run.count;
    shape[0] = 1;
    return std::decay_t<decltype(view)>(view.slice(0, batch, 1).slice(dim, run.first, 1).data(),
                                        view.dtype(), shape, strides);
  };
  const auto positions = [](const PositionRun& run) {
    return PositionRanges({PositionRange{GlobalPosition(run.first), run.count, run.step}});
  };
  BackwardBlock block{slice(all.query, 1, rows),
                      slice(all.key, 1, columns),
                      slice(all.value, 1, columns),
                      slice(all.grad_output, 1, rows),
                      slice(all.lse, 2, rows),
                      slice(all.delta, 2, rows),
                      positions(rows),
                      positions(columns)};
  block.first_batch = batch;
  Gradients parts{slice(sums.query, 1, rows), slice(sums.key, 1, columns),
                  slice(sums.value, 1, columns)};
  if (all.scores.bias) block.scores.bias = slice(*all.scores.bias, 2, rows);
  if (all.scores.mask) block.scores.mask = slice(*all.scores.mask, 2, rows);
  if (all.scores.bias) parts.bias = slice(sums.bias, 2, rows);
  return {block, parts};
}

}  // namespace annulus::test
