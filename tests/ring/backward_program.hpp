#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/oracle.hpp>
#include <annulus/attention/oracle_gradients.hpp>
#include <annulus/attention/registry.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/core/device.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/runner.hpp>

#include "tests/attention/random_tensor.hpp"
#include "tests/ring/sharded_reference.hpp"
#include "tests/support/test_world.hpp"

/// Plans of the backward pass, run over the ranks of a mesh and compared with the oracle.
namespace annulus::ring::test {

using annulus::test::Random;

/// A problem, and how its backward pass is sharded.
struct Program {
  std::string mesh, query, kv;
  Schedule schedule = Schedule::ring;
  AttentionProblem problem;
  BackwardRequest request = {};
  PlanOptions options = {};
};

inline std::vector<float> floats(const Tensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.shape().product()));
  to_float32(tensor.view().data(), tensor.dtype(), values.data(), tensor.shape().product());
  return values;
}

/// Tensors of the host, by content, and their copies where a device computes.
class TwinTensors {
 public:
  TwinTensors(Device& device, Stream& stream) : device_(device), stream_(stream) {}

  void add(Content content, Tensor host) {
    twins_.push_back({content, Tensor(host.dtype(), host.shape(), device_.memory())});
    host_.push_back(std::move(host));
  }
  [[nodiscard]] std::vector<CallTensor> views() const {
    std::vector<CallTensor> views;
    for (const auto& [content, twin] : twins_) views.push_back({content, twin.view()});
    return views;
  }
  void upload() {
    for (std::size_t i = 0; i < host_.size(); ++i) {
      device_.copy(host_[i].view(), twins_[i].second.view(), stream_);
    }
    stream_.synchronize();
  }
  /// The tensor of the device, widened; that of the host stays as it was.
  [[nodiscard]] std::vector<float> downloaded(Content content) {
    for (const auto& [held, twin] : twins_) {
      if (held != content) continue;
      const Tensor copy(twin.dtype(), twin.shape(), annulus::test::test_memory());
      device_.copy(twin.view(), copy.view(), stream_);
      stream_.synchronize();
      return floats(copy);
    }
    return {};
  }

 private:
  Device& device_;
  Stream& stream_;
  std::vector<Tensor> host_;
  std::vector<std::pair<Content, Tensor>> twins_;
};

inline Tensor rounded(DType dtype, const Extents& shape, const std::vector<double>& values) {
  return annulus::test::tensor_of(dtype, shape, {values.begin(), values.end()});
}

/// Runs the program's plan twice, by one implementation. Every rank compares its own shards with
/// the oracle's gradients (docs/semantics.md §6), and both runs bit by bit. Collective over the
/// mesh.
inline void expect_gradients(const Program& program, Mesh& mesh, Device& device,
                             const Implementation& implementation,
                             Transport transport = Transport::automatic) {
  const AttentionProblem& problem = program.problem;
  const AttentionShape& s = problem.shape;
  const ShardedOperands operands = shard_operands(
      problem, mesh.shape(),
      {PartitionSpec::parse(program.query), PartitionSpec::parse(program.kv), LayoutKind::zigzag});

  // The same on all ranks.
  Random random(7);
  const auto draw = [&](std::int64_t length, std::int64_t heads, std::int64_t dim) {
    return annulus::test::random_tensor(random, problem.dtype, {s.batch, length, heads, dim});
  };
  const Tensor query = draw(s.query_length, s.heads, s.head_dim);
  const Tensor key = draw(s.kv_length, s.kv_heads, s.head_dim);
  const Tensor value = draw(s.kv_length, s.kv_heads, s.value_dim);
  const Tensor grad_output = draw(s.query_length, s.heads, s.value_dim);
  const Extents lse_shape{s.batch, s.heads, s.query_length};
  const Tensor grad_lse = annulus::test::random_tensor(random, DType::float32, lse_shape);
  const PositionRanges rows = PositionRanges::all(s.query_length);
  Tensor bias;
  ScoreTensors scores;
  if (problem.bias) {
    bias = annulus::test::random_tensor(random, DType::float32, *problem.bias);
    scores = broadcast_scores(bias.view(), {}, {s.batch, s.heads, s.query_length, s.kv_length});
  }
  const OracleOutput forward =
      oracle_attention(problem, query.view(), key.view(), value.view(), rows, 0, 0, 0, scores);
  const Tensor output = rounded(problem.dtype, grad_output.shape(), forward.output);
  const Tensor lse = rounded(DType::float32, lse_shape, forward.lse);
  const ConstTensorView given = program.request.grad_lse ? grad_lse.view() : TensorView();
  const OracleGradients expected =
      oracle_gradients(problem, query.view(), key.view(), value.view(), grad_output.view(), given,
                       rows, 0, 0, 0, scores);

  const std::unique_ptr<Stream> copies =
      device.make_stream("copies", annulus::test::kWatchdog, nullptr);
  TwinTensors tensors(device, *copies);
  const int rank = mesh.rank();
  tensors.add(Content::query, shard_of(query, operands.query, rank));
  tensors.add(Content::key, shard_of(key, operands.key, rank));
  tensors.add(Content::value, shard_of(value, operands.value, rank));
  tensors.add(Content::output, shard_of(output, operands.output, rank));
  tensors.add(Content::lse, shard_of(lse, operands.lse, rank));
  tensors.add(Content::grad_output, shard_of(grad_output, operands.output, rank));
  if (program.request.grad_lse) {
    tensors.add(Content::grad_lse, shard_of(grad_lse, operands.lse, rank));
  }
  if (problem.bias) tensors.add(Content::bias, shard_of(bias, *operands.bias, rank));
  constexpr float kBefore = 0.5F;
  const auto add_gradient = [&](Content content, const NamedSharding& sharding, DType dtype) {
    const Extents shape = sharding.local_shape(rank);
    const float before = program.request.adds ? kBefore : NAN;  // NaN stays where nobody writes
    tensors.add(
        content,
        annulus::test::tensor_of(
            dtype, shape, std::vector<float>(static_cast<std::size_t>(shape.product()), before)));
  };
  add_gradient(Content::grad_query, operands.query, problem.dtype);
  add_gradient(Content::grad_key, operands.key, problem.dtype);
  add_gradient(Content::grad_value, operands.value, problem.dtype);
  if (program.request.grad_bias) {
    add_gradient(Content::grad_bias, *operands.bias, DType::float32);
  }
  const bool shares_sinks = problem.sinks && problem.sinks->shape().rank() == 1;
  const std::int64_t sinks = problem.sinks ? problem.sinks->per_head() : 0;
  const std::int64_t local_heads = operands.query.local_shape(rank)[2];
  if (program.request.grad_sinks) {
    const Extents shape{1, 1, shares_sinks ? 1 : local_heads, sinks};
    tensors.add(
        Content::grad_sinks,
        annulus::test::tensor_of(DType::float32, shape,
                                 std::vector<float>(static_cast<std::size_t>(shape.product()),
                                                    program.request.adds ? kBefore : NAN)));
  }

  const PlanInput input =
      make_plan_input(problem, operands, {&implementation}, device.place(),
                      CostModel::for_place(device.place()), program.options, program.request);
  RankPlan plan = make_rank_plan(input, program.schedule, rank);
  std::vector<Group*> groups;
  for (const PlanGroup& group : plan.groups) {
    groups.push_back(&mesh.group(group.axes, device.place(), transport));
  }
  RunnerOptions options;
  options.replay = false;
  Runner runner(problem, std::move(plan), input.candidates, groups, device, mesh.watchdog(),
                options);
  runner.connect();

  std::vector<std::vector<float>> first;
  for (int call = 0; call < 2; ++call) {
    tensors.upload();
    ASSERT_TRUE(runner.prepare(tensors.views()).empty());
    mesh.world().barrier();
    runner.submit(tensors.views(), nullptr);
    runner.wait();
    std::vector<std::vector<float>> found;
    const auto compare = [&](Content content, const NamedSharding& sharding,
                             const OracleGradient& truth, const Extents& shape) {
      const auto of_rank = [&](const std::vector<double>& values) {
        const Tensor whole = rounded(DType::float32, shape, values);
        return floats(shard_of(whole, sharding, rank));
      };
      const std::vector<float> wanted = of_rank(truth.values);
      const std::vector<float> magnitudes = of_rank(truth.magnitudes);
      found.push_back(tensors.downloaded(content));
      double error = 0;
      double scale = 0;
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        const double off = found.back()[i] - wanted[i] - (program.request.adds ? kBefore : 0);
        error += off * off;
        scale += double{magnitudes[i]} * magnitudes[i];
        if (program.request.adds) scale += kBefore * kBefore;
      }
      const double bound =
          problem.dtype == DType::float32
              ? 2e-6 * std::sqrt(
                           std::log2(static_cast<double>(std::max<std::int64_t>(2, s.kv_length))))
              : 6e-3;
      EXPECT_LE(std::sqrt(error), 2 * bound * std::sqrt(scale)) << name_of(content);
    };
    compare(Content::grad_query, operands.query, expected.query, query.shape());
    compare(Content::grad_key, operands.key, expected.key, key.shape());
    compare(Content::grad_value, operands.value, expected.value, value.shape());
    if (program.request.grad_bias) {
      compare(Content::grad_bias, *operands.bias, expected.bias, *problem.bias);
    }
    if (program.request.grad_sinks) {
      found.push_back(tensors.downloaded(Content::grad_sinks));
      const auto first_sink = static_cast<std::size_t>(
          shares_sinks
              ? 0
              : operands.query.positions(rank, 2).global(LocalPosition(0)).value() * sinks);
      // Only delta is computed from rounded outputs.
      const double bound = problem.dtype == DType::float32 ? 2e-5 : 1.2e-2;
      for (std::size_t i = 0; i < found.back().size(); ++i) {
        EXPECT_NEAR(found.back()[i] - (program.request.adds ? kBefore : 0),
                    expected.sinks.values[first_sink + i],
                    bound * (expected.sinks.magnitudes[first_sink + i] +
                             (program.request.adds ? kBefore : 0)))
            << "sink " << i;
      }
    }
    if (call == 0) {
      first = std::move(found);
    } else {
      EXPECT_EQ(found, first) << "another call, other bits";
    }
    mesh.world().barrier();
  }
}

}  // namespace annulus::ring::test
