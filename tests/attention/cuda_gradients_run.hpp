#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <annulus/core/error.hpp>

#include "tests/attention/cuda_run.hpp"
#include "tests/attention/gradients_run.hpp"

namespace annulus::test {

/// A block of a problem and the gradients that it adds to, all of them views of the host's tensors.
struct GradientPart {
  BackwardBlock block;
  Gradients gradients;
};

/// Host tensors and their twins on a device. at() turns a view of a host tensor into a view of its
/// twin.
class Twins {
 public:
  Twins(const std::vector<const Tensor*>& hosts, Device& device, Stream& stream)
      : device_(device), stream_(stream) {
    for (const Tensor* host : hosts) {
      if (host->shape().rank() == 0) continue;  // no tensor
      Tensor twin(host->dtype(), host->shape(), device.memory());
      if (host->bytes() > 0) device.copy(host->view(), twin.view(), stream);
      pairs_.emplace_back(host, std::move(twin));
    }
  }

  /// A view without dimensions stays without.
  [[nodiscard]] TensorView at(const ConstTensorView& view) const {
    if (view.rank() == 0) return {};
    for (const auto& [host, twin] : pairs_) {
      const auto* const begin = static_cast<const std::byte*>(host->view().data());
      const auto* const at = static_cast<const std::byte*>(view.data());
      if (at == begin || (at > begin && at < begin + host->bytes())) {
        return same_view(view, *host, twin);
      }
    }
    throw InternalError("the view belongs to no tensor that has a twin");
  }

  void download() {
    for (const auto& [host, twin] : pairs_) {
      if (host->bytes() > 0) device_.copy(twin.view(), host->view(), stream_);
    }
    stream_.synchronize();
  }

 private:
  Device& device_;
  Stream& stream_;
  std::vector<std::pair<const Tensor*, Tensor>> pairs_;
};

/// One kernel of the device adds the gradients of all parts to gradients in host memory.
inline void add_on_device(const Implementation& implementation, const WholeGradients& whole,
                          const std::vector<GradientPart>& parts, Device& device, Stream& stream) {
  const WholeAttention& forward = whole.forward;
  const AttentionProblem& problem = forward.problem;
  ASSERT_EQ(implementation.fits_backward(problem, device.place()).reason(), "");
  const Twins operands({&forward.query, &forward.key, &forward.value, &forward.bias, &forward.mask,
                        &whole.grad_output, &whole.lse, &whole.delta},
                       device, stream);
  Twins sums({&whole.query, &whole.key, &whole.value, &whole.bias}, device, stream);
  const std::unique_ptr<Kernel> kernel = implementation.make_kernel(problem, device);
  for (const GradientPart& part : parts) {
    ASSERT_EQ(implementation.takes_backward(problem, geometry_of(forward_of(part.block))).reason(),
              "");
    BackwardBlock block = part.block;
    for (ConstTensorView* view :
         {&block.query, &block.key, &block.value, &block.grad_output, &block.lse, &block.delta}) {
      *view = operands.at(*view);
    }
    if (block.scores.bias) block.scores.bias = operands.at(*block.scores.bias);
    if (block.scores.mask) block.scores.mask = operands.at(*block.scores.mask);
    const Gradients gradients{sums.at(part.gradients.query), sums.at(part.gradients.key),
                              sums.at(part.gradients.value), sums.at(part.gradients.bias)};
    kernel->prepare_backward(block, gradients);
    const std::size_t calls = device.memory().statistics().system_calls;
    kernel->backward(block, gradients, {stream, nullptr, 1});
    EXPECT_EQ(device.memory().statistics().system_calls, calls) << "allocated in a prepared call";
  }
  sums.download();
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

/// Gradients of one implementation beside the oracle's.
class CudaGradientsTest : public CudaTest {
 protected:
  /// `most`: the largest share of its bound that an error may have.
  explicit CudaGradientsTest(std::string name, double most = 1)
      : name_(std::move(name)), most_(most) {}

  [[nodiscard]] const Implementation& implementation() const { return registry_.get(name_); }

  /// One kernel adds the gradients of all parts, which are views of host tensors.
  void add(const WholeGradients& whole, std::vector<GradientPart> parts) {
    for (GradientPart& part : parts) part.block.repeats_bits = repeats_bits_;
    add_on_device(implementation(), whole, parts, *device_, *stream_);
  }
  void add(const WholeGradients& whole) { add(whole, {{whole.block(), whole.gradients()}}); }

  void expect_accurate(const WholeGradients& whole) {
    SCOPED_TRACE(describe(whole.forward.problem));
    add(whole);
    EXPECT_LT(whole.largest_share(), most_);
  }
  /// Computes each gradient in a call of its own, which leaves the other gradients as they are.
  void expect_gradients_one_by_one(const WholeGradients& whole) {
    const Gradients all = whole.gradients();
    add(whole, {{whole.block(), {.query = all.query}},
                {whole.block(), {.key = all.key}},
                {whole.block(), {.value = all.value}}});
    EXPECT_LT(whole.largest_share(), most_);
  }
  /// A kernel ignores its mask for a block marked as unmasked. `problem` must have no mask.
  void expect_unmasked_sees_everything(Random& random, const AttentionProblem& problem) {
    WholeGradients whole(random, problem);
    whole.forward.problem.mask.set_causal(true);
    BackwardBlock block = whole.block();
    block.unmasked = true;
    add(whole, {{block, whole.gradients()}});
    EXPECT_LT(whole.largest_share(), most_);
  }
  void expect_nothing_to_compute() {
    Random random(12);
    for (const AttentionShape& shape :
         {AttentionShape{1, 0, 128, 2, 1, 64, 64}, AttentionShape{1, 128, 0, 2, 1, 64, 64},
          AttentionShape{0, 128, 128, 2, 1, 64, 64}}) {
      const WholeGradients whole(random, half_problem(shape));
      add(whole);
      for (const float gradient : floats_of(whole)) ASSERT_EQ(gradient, 0);
    }
  }

  const Registry registry_ = Registry::standard();
  std::string name_;
  const double most_;
  bool repeats_bits_ = false;  // ask for gradients with the same bits every time
};

}  // namespace annulus::test
