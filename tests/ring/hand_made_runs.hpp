#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/oracle.hpp>
#include <annulus/attention/registry.hpp>
#include <annulus/core/device.hpp>
#include <annulus/ring/runner.hpp>

#include "tests/ring/hand_made_plans.hpp"
#include "tests/support/test_world.hpp"

/// Hand-made plans, run over a group and compared.
namespace annulus::ring::test {

/// Tensors of the host and their copies where a device computes.
class TwinTensors {
 public:
  explicit TwinTensors(Device& device)
      : device_(device), stream_(device.make_stream("copies", annulus::test::kWatchdog, nullptr)) {}

  Tensor& add(DType dtype, const Extents& shape) {
    host_.push_back(std::make_unique<Tensor>(dtype, shape, memory_));
    twins_.push_back(std::make_unique<Tensor>(dtype, shape, device_.memory()));
    return *host_.back();
  }
  [[nodiscard]] std::vector<TensorView> views() const {
    std::vector<TensorView> views;
    for (const auto& twin : twins_) views.push_back(twin->view());
    return views;
  }
  void upload() {
    for (std::size_t i = 0; i < host_.size(); ++i) {
      device_.copy(host_[i]->view(), twins_[i]->view(), *stream_);
    }
    stream_->synchronize();
  }
  void download() {
    for (std::size_t i = 0; i < host_.size(); ++i) {
      device_.copy(twins_[i]->view(), host_[i]->view(), *stream_);
    }
    stream_->synchronize();
  }

 private:
  Device& device_;
  std::unique_ptr<Stream> stream_;
  HostMemoryPool memory_;
  std::vector<std::unique_ptr<Tensor>> host_, twins_;
};

/// A number that depends on everything, small enough for sums to be exact.
inline float pattern(int from, int to, std::int64_t index, int round) {
  return static_cast<float>((from * 31 + to * 17 + index * 7 + round * 5) % 64);
}

/// Sums of contributions to every rank's gradient, several calls of one runner.
inline void expect_sums(RankPlan (*make)(const AttentionShape&, int, int), Group& group,
                        Device& device) {
  const int ranks = group.size();
  const int rank = group.rank();
  const AttentionShape local{2, 0, 5, 4, 2, 3, 3};
  AttentionProblem problem;
  problem.shape = local;
  Runner runner(problem, make(local, rank, ranks), {}, {&group}, device, annulus::test::kWatchdog,
                {});
  runner.connect();
  TwinTensors tensors(device);
  std::vector<Tensor*> contributions;
  const Extents shape{local.batch, local.kv_length, local.kv_heads, local.head_dim};
  for (int o = 0; o <= ranks; ++o) contributions.push_back(&tensors.add(DType::float32, shape));
  for (int round = 0; round < 4; ++round) {
    for (int o = 0; o < ranks; ++o) {
      float* const values =
          contributions[static_cast<std::size_t>(o)]->view().as<float>();
      for (std::int64_t i = 0; i < shape.product(); ++i) values[i] = pattern(rank, o, i, round);
    }
    float* const sums = contributions.back()->view().as<float>();
    for (std::int64_t i = 0; i < shape.product(); ++i) sums[i] = NAN;
    tensors.upload();
    ASSERT_TRUE(runner.prepare(tensors.views()).empty());
    group.control().barrier();
    runner.submit(tensors.views(), nullptr);
    runner.wait();
    tensors.download();
    for (std::int64_t i = 0; i < shape.product(); ++i) {
      float expected = 0;
      for (int from = 0; from < ranks; ++from) expected += pattern(from, rank, i, round);
      ASSERT_EQ(sums[i], expected) << "element " << i << " of rank " << rank << ", call " << round;
    }
    // Nobody changes what another rank may still read.
    group.control().barrier();
  }
}

/// Heads for sequence and back, against the oracle.
inline void expect_heads_for_sequence(Group& group, Device& device) {
  const int ranks = group.size();
  const int rank = group.rank();
  const std::int64_t n = 9;
  AttentionProblem problem;
  problem.shape = {2, n * ranks, n * ranks, 8, 4, 16, 8};
  problem.mask.set_causal(true);
  AttentionShape local = problem.shape;
  local.query_length = local.kv_length = n;
  const Registry registry = Registry::standard();
  const std::vector<const Implementation*> native{&registry.get("native")};
  Runner runner(problem, heads_for_sequence(local, problem.dtype, rank, ranks), native, {&group},
                device, annulus::test::kWatchdog, {});
  runner.connect();
  TwinTensors tensors(device);
  const auto value_at = [](int which, std::int64_t b, std::int64_t t, std::int64_t h,
                           std::int64_t d) {
    return std::sin(static_cast<float>(which * 97 + b * 53 + t * 11 + h * 29 + d * 7));
  };
  const auto fill = [&](const TensorView& view, int which, std::int64_t first) {
    for (std::int64_t b = 0; b < view.size(0); ++b) {
      for (std::int64_t t = 0; t < view.size(1); ++t) {
        for (std::int64_t h = 0; h < view.size(2); ++h) {
          for (std::int64_t d = 0; d < view.size(3); ++d) {
            view.at<float>({b, t, h, d}) = value_at(which, b, first + t, h, d);
          }
        }
      }
    }
  };
  const auto shape_of = [&](std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
    return Extents{problem.shape.batch, tokens, heads, dim};
  };
  Tensor& query = tensors.add(DType::float32, shape_of(n, 8, 16));
  Tensor& key = tensors.add(DType::float32, shape_of(n, 4, 16));
  Tensor& value = tensors.add(DType::float32, shape_of(n, 4, 8));
  Tensor& output = tensors.add(DType::float32, shape_of(n, 8, 8));
  Tensor& lse = tensors.add(DType::float32, {problem.shape.batch, 8, n});
  fill(query.view(), 0, n * rank);
  fill(key.view(), 1, n * rank);
  fill(value.view(), 2, n * rank);
  HostMemoryPool memory;
  const Tensor keys(DType::float32, shape_of(n * ranks, 4, 16), memory);
  const Tensor values(DType::float32, shape_of(n * ranks, 4, 8), memory);
  fill(keys.view(), 1, 0);
  fill(values.view(), 2, 0);
  const PositionRanges rows({{GlobalPosition(n * rank), n, 1}});
  const OracleOutput truth =
      oracle_attention(problem, query.view(), keys.view(), values.view(), rows, 0, 0);
  for (int call = 0; call < 3; ++call) {
    tensors.upload();
    ASSERT_TRUE(runner.prepare(tensors.views()).empty());
    group.control().barrier();
    runner.submit(tensors.views(), nullptr);
    runner.wait();
    tensors.download();
    const auto* found = output.view().as<float>();
    for (std::size_t i = 0; i < truth.output.size(); ++i) {
      ASSERT_NEAR(found[i], truth.output[i], 2e-6) << i;
    }
    const auto* found_lse = lse.view().as<float>();
    for (std::size_t i = 0; i < truth.lse.size(); ++i) {
      ASSERT_NEAR(found_lse[i], truth.lse[i], 1e-5) << i;
    }
    group.control().barrier();
  }
}

}  // namespace annulus::ring::test
