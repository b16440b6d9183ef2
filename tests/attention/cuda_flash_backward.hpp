#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/attention/cuda_run.hpp"
#include "tests/attention/gradients_run.hpp"

namespace annulus::test {

struct Dims {
  std::int64_t head, value;
};
/// Of each kernel.
inline constexpr Dims kAllDims[] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};

inline AttentionProblem bfloat16_problem(const AttentionShape& shape) {
  return problem_of(shape, DType::bfloat16);
}

/// Gradients of flash attention on the device, beside the oracle's.
class CudaFlashBackward : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    const Capability can = flash().available(device_->place());
    if (!can) GTEST_SKIP() << can.reason();
  }

  const Registry registry_ = Registry::standard();
  std::string name_ = "flash_attn2";
  bool repeats_bits_ = false;  // of the gradients that are asked for

  [[nodiscard]] const Implementation& flash() const { return registry_.get(name_); }

  struct Part {
    BackwardBlock block;
    Gradients gradients;
  };
  /// Views of the host's tensors; one kernel adds the gradients of all parts to them.
  void add(const WholeGradients& whole, const std::vector<Part>& parts) {
    const AttentionProblem& problem = whole.forward.problem;
    ASSERT_EQ(flash().fits_backward(problem, device_->place()).reason(), "");
    const Mirror query(whole.forward.query, *device_), key(whole.forward.key, *device_);
    const Mirror value(whole.forward.value, *device_), grad_output(whole.grad_output, *device_);
    const Mirror lse(whole.lse, *device_), delta(whole.delta, *device_);
    const Mirror grad_query(whole.query, *device_), grad_key(whole.key, *device_);
    const Mirror grad_value(whole.value, *device_);
    const std::unique_ptr<Kernel> kernel = flash().make_kernel(problem, *device_);
    for (const Part& part : parts) {
      ASSERT_EQ(flash().takes_backward(problem, geometry_of(forward_of(part.block))).reason(), "");
      BackwardBlock block = part.block;
      block.query = query.at(block.query);
      block.key = key.at(block.key);
      block.value = value.at(block.value);
      block.grad_output = grad_output.at(block.grad_output);
      block.lse = lse.at(block.lse);
      block.delta = delta.at(block.delta);
      block.repeats_bits = repeats_bits_;
      const auto there = [](const TensorView& view, const Mirror& mirror) {
        return view.shape().rank() == 0 ? TensorView() : mirror.at(view);
      };
      const Gradients gradients{there(part.gradients.query, grad_query),
                                there(part.gradients.key, grad_key),
                                there(part.gradients.value, grad_value)};
      kernel->prepare_backward(block, gradients);
      kernel->backward(block, gradients, {*stream_, nullptr, 1});
    }
    stream_->synchronize();
    grad_query.download();
    grad_key.download();
    grad_value.download();
  }
  void add(const WholeGradients& whole) { add(whole, {{whole.block(), whole.gradients()}}); }

  /// Adds to gradients in host memory, all of which are wanted.
  void add_block(const AttentionProblem& problem, BackwardBlock block, const Gradients& gradients) {
    std::vector<std::unique_ptr<ViewMirror>> mirrors;
    const auto there = [&](const ConstTensorView& view) {
      mirrors.push_back(std::make_unique<ViewMirror>(view, *device_));
      return mirrors.back()->view();
    };
    for (ConstTensorView* view :
         {&block.query, &block.key, &block.value, &block.grad_output, &block.lse, &block.delta}) {
      *view = there(*view);
    }
    const std::size_t operands = mirrors.size();
    const Gradients sums{there(gradients.query), there(gradients.key), there(gradients.value)};
    const std::unique_ptr<Kernel> kernel = flash().make_kernel(problem, *device_);
    kernel->prepare_backward(block, sums);
    kernel->backward(block, sums, {*stream_, nullptr, 1});
    stream_->synchronize();
    mirrors[operands]->download(gradients.query);
    mirrors[operands + 1]->download(gradients.key);
    mirrors[operands + 2]->download(gradients.value);
  }

  void expect_accurate(Random& random, const AttentionProblem& problem) {
    SCOPED_TRACE(to_string(problem.shape) + " " + std::string(name_of(problem.dtype)) + " mask " +
                 to_string(problem.mask));
    const WholeGradients whole(random, problem);
    add(whole);
    EXPECT_LT(whole.largest_share(), 1);
  }
  void expect_all_accurate(Random& random, const AttentionProblem& problem) {
    expect_accurate(random, problem, kAllDims);
  }
  /// Of the kernels for up to 128 dimensions.
  void expect_narrow_accurate(Random& random, const AttentionProblem& problem) {
    expect_accurate(random, problem, {kAllDims, 2});
  }
  void expect_accurate(Random& random, AttentionProblem problem, std::span<const Dims> all) {
    for (const Dims& dims : all) {
      for (const DType dtype : {DType::bfloat16, DType::float16}) {
        problem.shape.head_dim = dims.head;
        problem.shape.value_dim = dims.value;
        problem.dtype = dtype;
        expect_accurate(random, problem);
      }
    }
  }

  void expect_blocks_add_up(const Dims& dims) {
    Random random(6);
    AttentionProblem problem = bfloat16_problem({2, 320, 320, 4, 2, dims.head, dims.value});
    problem.mask.set_causal(true);
    problem.mask.set_kv_lengths({320, 250});
    const WholeGradients whole(random, problem);
    const BackwardBlock all = whole.block();
    const Gradients sums = whole.gradients();
    std::vector<Part> parts;
    // Rows of the ranges of zigzag shards, and of every third position.
    const auto slice = [](const auto& view, int dim, std::int64_t first, std::int64_t count,
                          std::int64_t step) {
      auto strides = view.strides();
      auto shape = view.shape();
      strides[dim] *= step;
      shape[dim] = count;
      return std::decay_t<decltype(view)>(view.slice(dim, first, 1).data(), view.dtype(), shape,
                                          strides);
    };
    struct Run {
      std::int64_t first, count, step;
    };
    for (const Run& r :
         {Run{0, 80, 1}, Run{240, 80, 1}, Run{80, 54, 3}, Run{81, 53, 3}, Run{82, 53, 3}}) {
      const std::vector<Run> columns =
          r.step == 1 ? std::vector<Run>{{0, 80, 1}, {80, 160, 1}, {240, 80, 1}}
                      : std::vector<Run>{{0, 107, 3}, {1, 107, 3}, {2, 106, 3}};
      for (const Run& c : columns) {
        for (std::int64_t b = 0; b < 2; ++b) {
          const auto of_rows = [&](const auto& view, int dim) {
            return slice(view.slice(0, b, 1), dim, r.first, r.count, r.step);
          };
          const auto of_columns = [&](const auto& view) {
            return slice(view.slice(0, b, 1), 1, c.first, c.count, c.step);
          };
          BackwardBlock block{
              of_rows(all.query, 1),
              of_columns(all.key),
              of_columns(all.value),
              of_rows(all.grad_output, 1),
              of_rows(all.lse, 2),
              of_rows(all.delta, 2),
              PositionRanges({PositionRange{GlobalPosition(r.first), r.count, r.step}}),
              PositionRanges({PositionRange{GlobalPosition(c.first), c.count, c.step}})};
          block.first_batch = b;
          parts.push_back(
              {block, {of_rows(sums.query, 1), of_columns(sums.key), of_columns(sums.value)}});
        }
      }
    }
    add(whole, parts);
    EXPECT_LT(whole.largest_share(), 1);
  }
};

}  // namespace annulus::test
