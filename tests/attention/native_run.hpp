#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/accuracy.hpp>
#include <annulus/attention/oracle.hpp>
#include <annulus/attention/registry.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/host_stream.hpp>

#include "tests/attention/random_tensor.hpp"
#include "tests/support/for_each_index.hpp"

namespace annulus::test {

inline const Implementation& native() {
  static const Registry registry = Registry::standard();
  return registry.get("native");
}

/// A problem with its whole, unsharded tensors.
struct WholeAttention {
  AttentionProblem problem;
  Tensor query;
  Tensor key;
  Tensor value;
  Tensor bias = {};  ///< [B,N,T,S], 1 where it is broadcast; without dimensions if there is none
  Tensor mask = {};  ///< likewise

  [[nodiscard]] ScoreTensors scores() const {
    const AttentionShape& s = problem.shape;
    return broadcast_scores(bias.view(), mask.view(),
                            {s.batch, s.heads, s.query_length, s.kv_length});
  }
  [[nodiscard]] PositionRanges rows() const {
    return PositionRanges::all(problem.shape.query_length);
  }
  [[nodiscard]] PositionRanges columns() const {
    return PositionRanges::all(problem.shape.kv_length);
  }
  [[nodiscard]] AttentionBlock block() const {
    AttentionBlock block{query.view(), key.view(), value.view(), rows(), columns()};
    block.scores = scores();
    return block;
  }
  [[nodiscard]] OracleOutput oracle() const {
    return oracle_attention(problem, query.view(), key.view(), value.view(), rows(), 0, 0, 0,
                            scores());
  }
};

/// Batches 1 and 2 and query heads 2 and 3 of a block of three batches, four query heads and two
/// key/value heads.
inline AttentionBlock part_of_batch_and_heads(AttentionBlock block) {
  block.first_batch = 1;
  block.first_head = 2;
  block.query = block.query.slice(0, 1, 2).slice(2, 2, 2);
  block.key = block.key.slice(0, 1, 2).slice(2, 1, 1);
  block.value = block.value.slice(0, 1, 2).slice(2, 1, 1);
  block.scores = block.scores.slice(0, 1, 2).slice(1, 2, 2);
  return block;
}

/// A random mask with three of four pairs visible.
inline Tensor random_dense_mask(Random& random, const Extents& shape) {
  Tensor mask(DType::boolean, shape, test_memory());
  auto* const entries = static_cast<std::uint8_t*>(mask.view().data());
  for (std::int64_t i = 0; i < shape.product(); ++i) entries[i] = random() % 4 == 0 ? 0 : 1;
  return mask;
}

/// A problem with these entries of its tensors.
inline WholeAttention attention_of(const AttentionProblem& problem, const std::vector<float>& query,
                                   const std::vector<float>& key, const std::vector<float>& value) {
  const AttentionShape& s = problem.shape;
  return {problem, tensor_of(problem.dtype, {s.batch, s.query_length, s.heads, s.head_dim}, query),
          tensor_of(problem.dtype, {s.batch, s.kv_length, s.kv_heads, s.head_dim}, key),
          tensor_of(problem.dtype, {s.batch, s.kv_length, s.kv_heads, s.value_dim}, value)};
}

inline WholeAttention random_attention(Random& random, const AttentionProblem& problem) {
  const AttentionShape& s = problem.shape;
  WholeAttention whole{
      problem, random_tensor(random, problem.dtype, {s.batch, s.query_length, s.heads, s.head_dim}),
      random_tensor(random, problem.dtype, {s.batch, s.kv_length, s.kv_heads, s.head_dim}),
      random_tensor(random, problem.dtype, {s.batch, s.kv_length, s.kv_heads, s.value_dim})};
  if (problem.bias) whole.bias = random_tensor(random, DType::float32, *problem.bias, 2);
  if (problem.dense_mask) whole.mask = random_dense_mask(random, *problem.dense_mask);
  return whole;
}

/// The entries at `positions` of dimension 1, stored as [B,N,T,D] and viewed as [B,T,N,D].
inline Tensor gather(const ConstTensorView& whole, const PositionRanges& positions) {
  Tensor part(whole.dtype(), {whole.size(0), whole.size(2), positions.size(), whole.size(3)},
              test_memory());
  const TensorView view = part.view().permute({0, 2, 1, 3});
  for (std::int64_t i = 0; i < positions.size(); ++i) {
    copy(whole.slice(1, positions.global(LocalPosition(i)).value(), 1), view.slice(1, i, 1));
  }
  return part;
}

inline TensorView as_bthd(const Tensor& bhtd) {
  return bhtd.view().permute({0, 2, 1, 3});
}

/// A softmax state in host memory.
struct Result {
  explicit Result(const Extents& shape, DType lse_dtype = DType::float32,
                  DType dtype = DType::float32)
      : output(dtype, shape, test_memory()),
        lse(lse_dtype, {shape[0], shape[2], shape[1]}, test_memory()) {
    // NaN in any dtype: whatever is left unwritten shows.
    std::memset(output.view().data(), 0xff, output.bytes());
    std::memset(lse.view().data(), 0xff, lse.bytes());
  }
  /// For a block.
  explicit Result(const AttentionBlock& block, DType lse_dtype = DType::float32)
      : Result(Extents{block.query.size(0), block.query.size(1), block.query.size(2),
                       block.value.size(3)},
               lse_dtype) {}
  [[nodiscard]] SoftmaxState state() const { return {output.view(), lse.view()}; }
  bool operator==(const Result& other) const {
    return std::memcmp(output.view().data(), other.output.view().data(), output.bytes()) == 0 &&
           std::memcmp(lse.view().data(), other.lse.view().data(), lse.bytes()) == 0;
  }
  Tensor output;
  Tensor lse;
};

/// The CPU, and a stream for calls that have ended when they return.
struct Cpu {
  [[nodiscard]] ExecutionContext context(int threads = 1, Stream* background = nullptr) {
    return {stream, background, threads};
  }

  HostDevice device;
  HostStream stream{"compute", Watchdog(Watchdog::Seconds(60)), nullptr};
};

/// One call on a CPU of its own.
inline void forward_on_cpu(const Implementation& implementation, const AttentionProblem& problem,
                           const AttentionBlock& block, const SoftmaxState& result, int threads = 1,
                           Stream* background = nullptr) {
  Cpu cpu;
  implementation.make_kernel(problem, cpu.device)
      ->forward(block, result, cpu.context(threads, background));
}

inline Result run_native(const AttentionProblem& problem, const AttentionBlock& block,
                         int threads = 1, DType lse_dtype = DType::float32) {
  Result result(block, lse_dtype);
  forward_on_cpu(native(), problem, block, result.state(), threads);
  return result;
}

/// Relative Frobenius error of the output, rounded to `dtype` first, and largest error of the LSE.
struct Error {
  double output = 0;
  double lse = 0;
};

inline Error error_of(const Result& result, DType dtype, const OracleOutput& truth) {
  const Tensor rounded(dtype, result.output.shape(), test_memory());
  from_float32(result.output.view().as<float>(), dtype, rounded.view().data(),
               result.output.shape().product());
  std::vector<float> output(truth.output.size());
  to_float32(rounded.view().data(), dtype, output.data(), static_cast<std::int64_t>(output.size()));
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < output.size(); ++i) {
    difference += std::pow(output[i] - truth.output[i], 2);
    norm += std::pow(truth.output[i], 2);
  }
  Error error{norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference), 0};
  for (std::size_t i = 0; i < truth.lse.size(); ++i) {
    const float lse = result.lse.dtype() == DType::float64
                          ? static_cast<float>(result.lse.view().as<double>()[i])
                          : result.lse.view().as<float>()[i];
    // Equal infinities differ by nothing; anything else that is not finite is caught here.
    const double miss = lse == truth.lse[i] ? 0 : std::abs(lse - truth.lse[i]);
    error.lse =
        std::isnan(miss) ? std::numeric_limits<double>::infinity() : std::max(error.lse, miss);
  }
  if (std::isnan(error.output)) error.output = std::numeric_limits<double>::infinity();
  return error;
}

/// The largest share of its bound (see row_bound()) that the error of a row has.
inline Error largest_shares(const Result& result, const AttentionProblem& problem,
                            const OracleOutput& truth) {
  const Extents& shape = result.output.shape();
  const Tensor rounded(problem.dtype, shape, test_memory());
  from_float32(result.output.view().as<float>(), problem.dtype, rounded.view().data(),
               shape.product());
  const auto dim = static_cast<std::size_t>(shape[3]);
  std::vector<float> values(dim);
  Error largest;
  std::size_t entry = 0;
  for_each_of<3>({shape[0], shape[1], shape[2]}, [&](auto b, auto t, auto n) {
    to_float32(rounded.view().address({b, t, n}), problem.dtype, values.data(), shape[3]);
    double difference = 0;
    double norm = 0;
    for (std::size_t d = 0; d < dim; ++d, ++entry) {
      difference += std::pow(values[d] - truth.output[entry], 2);
      norm += std::pow(truth.output[entry], 2);
    }
    const auto row = static_cast<std::size_t>((b * shape[2] + n) * shape[1] + t);
    const RowBound bound = row_bound(problem, truth.terms[row], std::sqrt(norm));
    const double lse = result.state().lse_at(b, n, t);
    const double miss = lse == truth.lse[row] ? 0 : std::abs(lse - truth.lse[row]);
    const auto raise = [](double& share, double error, double allowed) {
      const double ratio = error == 0 ? 0 : error / allowed;
      if (!(ratio <= share)) share = ratio;  // NaN stays
    };
    raise(largest.output, std::sqrt(difference), bound.output);
    raise(largest.lse, miss, bound.lse);
  });
  return largest;
}

/// The bounds of docs/semantics.md §6, for the whole and for each row. A truth that another kernel
/// has computed has no terms for rows, and is compared as a whole.
inline void expect_accurate(const Result& result, const WholeAttention& whole,
                            const OracleOutput& truth) {
  const Error error = error_of(result, whole.problem.dtype, truth);
  EXPECT_LE(error.output, accuracy_bound(whole.problem).output);
  if (truth.terms.empty()) {
    constexpr double kHalfLse = 2e-3;
    EXPECT_LE(error.lse,
              whole.problem.dtype == DType::float32 ? accuracy_bound(whole.problem).lse : kHalfLse);
    return;
  }
  const Error shares = largest_shares(result, whole.problem, truth);
  EXPECT_LE(shares.output, 1);
  EXPECT_LE(shares.lse, 1);
}

}  // namespace annulus::test
