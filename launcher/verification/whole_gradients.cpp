#include "whole_gradients.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/memory.hpp>
#include <annulus/core/parallel.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/verification/filled_part.hpp>

namespace annulus::verification {
namespace {

std::int64_t entries_of(const AttentionProblem& problem, const ring::BackwardRequest& request) {
  const AttentionShape& shape = problem.shape;
  return shape.batch * (shape.query_length * shape.heads * shape.head_dim +
                        shape.kv_length * shape.kv_heads * (shape.head_dim + shape.value_dim)) +
         (request.grad_bias ? problem.bias->product() : 0);
}

void add_to(std::vector<double>& sum, const std::vector<double>& part) {
  for (std::size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
}

// Gradients of all rows, initially 0.
OracleGradients no_gradients(const AttentionProblem& problem,
                             const ring::BackwardRequest& request) {
  const AttentionShape& s = problem.shape;
  const auto zeros = [](std::int64_t entries) {
    const std::vector<double> values(static_cast<std::size_t>(entries));
    return OracleGradient{values, values};
  };
  OracleGradients gradients;
  gradients.query = zeros(s.batch * s.query_length * s.heads * s.head_dim);
  gradients.key = zeros(s.batch * s.kv_length * s.kv_heads * s.head_dim);
  gradients.value = zeros(s.batch * s.kv_length * s.kv_heads * s.value_dim);
  if (problem.sinks) gradients.sinks = zeros(problem.sinks->shape().product());
  gradients.sink_squares.resize(gradients.sinks.values.size());
  if (request.grad_bias) gradients.bias = zeros(problem.bias->product());
  gradients.bias_squares.resize(gradients.bias.values.size());
  return gradients;
}

// Adds the gradients of `count` rows from `begin` on.
void add_rows(OracleGradients& whole, const OracleGradients& part, const AttentionProblem& problem,
              std::int64_t begin, std::int64_t count) {
  const AttentionShape& s = problem.shape;
  const auto add = [](OracleGradient& sum, const OracleGradient& term) {
    add_to(sum.values, term.values);
    add_to(sum.magnitudes, term.magnitudes);
  };
  add(whole.key, part.key);
  add(whole.value, part.value);
  add(whole.sinks, part.sinks);
  add_to(whole.sink_squares, part.sink_squares);
  const std::int64_t row = s.heads * s.head_dim;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    const auto place = [&](const std::vector<double>& from, std::vector<double>& to) {
      std::copy_n(from.data() + b * count * row, count * row,
                  to.data() + (b * s.query_length + begin) * row);
    };
    place(part.query.values, whole.query.values);
    place(part.query.magnitudes, whole.query.magnitudes);
  }
  if (whole.bias.values.empty()) return;
  // The bias's gradient for these rows, or for all rows if they share it.
  const Extents& bias = *problem.bias;
  const bool by_row = bias[2] != 1;
  const std::int64_t size = (by_row ? count : 1) * bias[3];
  const auto add_bias = [&](std::vector<double>& to, const std::vector<double>& from) {
    for (std::int64_t i = 0; i < bias[0] * bias[1]; ++i) {
      const std::int64_t first = (i * bias[2] + (by_row ? begin : 0)) * bias[3];
      for (std::int64_t j = 0; j < size; ++j) {
        to[static_cast<std::size_t>(first + j)] += from[static_cast<std::size_t>(i * size + j)];
      }
    }
  };
  add_bias(whole.bias.values, part.bias.values);
  add_bias(whole.bias.magnitudes, part.bias.magnitudes);
  add_bias(whole.bias_squares, part.bias_squares);
}

}  // namespace

void check_gradients_fit(const AttentionProblem& problem, const ring::BackwardRequest& request) {
  const std::int64_t entries = entries_of(problem, request);
  if (entries <= kMaxGradientEntries) return;
  throw ArgumentError(
      "gradients to be verified", fmt::format("{} entries", entries),
      fmt::format("at most {} in query, key and value (and bias) together: every rank holds "
                  "the oracle's of the whole problem",
                  kMaxGradientEntries));
}

OracleGradients whole_gradients(const ShardedCase& sharded_case, Control& ranks, int threads,
                                const Phase& phase) {
  constexpr std::int64_t kRows = 16;  // at a time, so that progress can be told
  const AttentionProblem& problem = sharded_case.problem;
  const AttentionShape& s = problem.shape;
  OracleGradients whole = no_gradients(problem, sharded_case.backward->request);
  collectively(ranks, "gradients of the oracle", [&] {
    const Computing computing = ranks.computing();
    HostMemoryPool memory;
    const ring::ShardedOperands operands = ring::shard_operands(problem, MeshShape(), {});
    const CaseShards whole_case(operands, problem.dtype, sharded_case.seed, 0, memory, 1,
                                sharded_case.fills);
    const ScoreTensors scores = whole_case.scores(s.kv_length);
    const Tensor grad_output =
        random_grad_output(operands, problem.dtype, sharded_case.seed, 0, memory);
    const Tensor lse_gradient = random_grad_lse(operands, sharded_case.seed, 0, memory);
    const ConstTensorView grad_lse(lse_gradient.view().data(), DType::float32,
                                   operands.lse.global_shape());
    const bool with_grad_lse = sharded_case.backward->request.grad_lse;
    const auto of_rows = [&](std::int64_t begin, std::int64_t count) {
      return oracle_gradients(
          problem, whole_case.query.view().slice(1, begin, count), whole_case.key.view(),
          whole_case.value.view(), grad_output.view().slice(1, begin, count),
          with_grad_lse ? grad_lse.slice(2, begin, count) : ConstTensorView(),
          PositionRanges::all(s.query_length).slice({LocalPosition(begin), count}), 0, 0, 0,
          scores.slice(2, begin, count));
    };
    const std::int64_t pieces = (s.query_length + kRows - 1) / kRows;
    std::vector<std::int64_t> mine;  // in turn, as under a causal mask later rows see more
    for (std::int64_t i = ranks.rank(); i < pieces; i += ranks.size()) mine.push_back(i * kRows);
    const auto count = static_cast<std::int64_t>(mine.size());
    for (std::int64_t first = 0; first < count; first += threads) {
      if (phase)
        phase("oracle's gradients", static_cast<double>(first), static_cast<double>(count));
      const std::int64_t together = std::min<std::int64_t>(threads, count - first);
      std::vector<OracleGradients> parts(static_cast<std::size_t>(together));
      const auto rows_of = [&](std::int64_t i) {
        const std::int64_t begin = mine[static_cast<std::size_t>(first + i)];
        return std::pair(begin, std::min(kRows, s.query_length - begin));
      };
      parallel_for(together, static_cast<int>(together), [&](std::int64_t i, int /*worker*/) {
        const auto [begin, rows] = rows_of(i);
        parts[static_cast<std::size_t>(i)] = of_rows(begin, rows);
      });
      for (std::int64_t i = 0; i < together; ++i) {
        const auto [begin, rows] = rows_of(i);
        add_rows(whole, parts[static_cast<std::size_t>(i)], problem, begin, rows);
      }
    }
  });
  for (OracleGradient* gradient :
       {&whole.query, &whole.key, &whole.value, &whole.sinks, &whole.bias}) {
    gradient->values = ranks.sum(gradient->values, "gradients of the oracle");
    gradient->magnitudes = ranks.sum(gradient->magnitudes, "gradients of the oracle");
  }
  for (std::vector<double>* squares : {&whole.sink_squares, &whole.bias_squares}) {
    *squares = ranks.sum(*squares, "gradients of the oracle");
  }
  return whole;
}

}  // namespace annulus::verification
