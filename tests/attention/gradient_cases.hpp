#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/attention/gradients_run.hpp"
#include "tests/attention/random_mask.hpp"

/// Cases that every implementation of gradients has to pass.
namespace annulus::test {

/// Where the oracle's gradients are finite so are those found, and right; elsewhere none is finite.
inline void expect_same_reach(const WholeGradients& whole) {
  const auto compare = [&](const Tensor& tensor, const OracleGradient& truth, const char* name) {
    double difference = 0, magnitude = 0;
    std::size_t poisoned = 0, missed = 0, finite = 0;
    for (std::size_t i = 0; i < truth.values.size(); ++i) {
      const double found = entry(tensor, i);
      if (!std::isfinite(truth.values[i])) {
        if (std::isfinite(found)) ++missed;
      } else if (!std::isfinite(found)) {
        ++poisoned;
      } else {
        ++finite;
        difference += std::pow(found - truth.values[i], 2);
        magnitude += std::pow(truth.magnitudes[i], 2);
      }
    }
    EXPECT_EQ(poisoned, 0U) << name;
    EXPECT_EQ(missed, 0U) << name;
    EXPECT_GT(finite, 0U) << name;
    const double bound = 2 * accuracy_bound(whole.forward.problem).output;
    EXPECT_LE(std::sqrt(difference), bound * std::sqrt(magnitude)) << name;
  };
  compare(whole.query, whole.truth.query, "query");
  compare(whole.key, whole.truth.key, "key");
  compare(whole.value, whole.truth.value, "value");
  if (whole.forward.problem.bias) compare(whole.bias, whole.truth.bias, "bias");
}

/// Overwrites one position of all heads, of all batches or of one, or only the entry `only` there.
inline void fill(const Tensor& tensor, std::int64_t position, float x,
                 std::optional<std::int64_t> only = {}, std::int64_t batch = -1) {
  const Extents& shape = tensor.shape();
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    if (batch >= 0 && b != batch) continue;
    for (std::int64_t h = 0; h < shape[2]; ++h) {
      for (std::int64_t d = 0; d < shape[3]; ++d) {
        if (only && d != *only) continue;
        from_float32(&x, tensor.dtype(), tensor.view().address({b, position, h, d}), 1);
      }
    }
  }
}

/// Puts an entry that is not finite into one operand, at some positions of head 0. Vanilla computes
/// on the CPU, pair by pair, only pairs that see each other. Sequences are of this length.
inline void expect_reach_of_non_finite(std::int64_t length, const AddGradients& add) {
  Random random(70);
  const Registry registry = Registry::standard();
  const AddGradients reference = gradients_by(registry.get("vanilla"));
  const auto part = [&](double share) {
    return static_cast<std::int32_t>(share * static_cast<double>(length));
  };
  std::vector<Mask> masks(6);
  masks[0].set_causal(true);
  masks[1].set_window(part(0.15), 3);
  const std::vector<std::int32_t> ids = random_segments(random, 2, length);
  masks[2].set_segments(2, ids, ids);
  masks[3].set_kv_lengths({part(0.93), part(0.5)});
  masks[3].set_query_lengths({part(0.35), static_cast<std::int32_t>(length - 1)});
  masks[4].set_block_mask(BlockMask::random(length, length, 4, 0.5, 1, {24, 16}));
  for (const Mask& mask : masks) {
    for (const bool modified : {false, true}) {
      AttentionProblem problem = problem_of({2, length, length, 4, 2, 6, 4});
      problem.mask = mask;
      if (modified) {
        problem.soft_cap = 3.0;
        problem.dropout.emplace(0.3, 4);
        problem.bias = Extents{1, 4, length, length};
        problem.dense_mask = Extents{2, 1, length, length};
      }
      WholeGradients whole(random, problem);
      const std::vector<float> clean = run(add, whole, whole.block());
      for (const int operand : {0, 1, 2, 3}) {
        for (const float value :
             {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
          SCOPED_TRACE(to_string(mask) + (modified ? ", modified" : "") + ": operand " +
                       std::to_string(operand));
          const std::array<const Tensor*, 4> operands{&whole.forward.query, &whole.forward.key,
                                                      &whole.forward.value, &whole.grad_output};
          const Tensor& tensor = *operands.at(static_cast<std::size_t>(operand));
          const std::vector<float> before = floats_of(tensor);
          for (const std::int64_t row : {length * 43 / 100, length - 1}) {
            tensor.view().at<float>({1, row, 0, 1}) = value;
          }
          // Delta stays: only what the backward pass itself spreads shows.
          Tensor lse = std::move(whole.lse);
          whole.lse = filled(DType::float32, lse.shape(), whole.forward.oracle().lse);
          const std::vector<float> truth = run(reference, whole, whole.block());
          const std::vector<float> got = run(add, whole, whole.block());
          std::copy(before.begin(), before.end(), tensor.view().as<float>());
          whole.lse = std::move(lse);
          std::size_t spoilt = 0;
          for (std::size_t i = 0; i < truth.size(); ++i) {
            ASSERT_EQ(std::isfinite(got[i]), std::isfinite(truth[i])) << i;
            if (std::isfinite(truth[i])) {
              ASSERT_NEAR(got[i], truth[i], 1e-4 * (1 + std::abs(truth[i]))) << i;
            } else {
              ++spoilt;
            }
          }
          EXPECT_LT(spoilt, truth.size());
          const bool may_be_padding = problem.mask.has_segments();
          EXPECT_TRUE(spoilt > 0 || may_be_padding);
        }
      }
      EXPECT_TRUE(same_bits(run(add, whole, whole.block()), clean));
    }
  }
}

/// Rows that see nothing, or only logits of −∞, add nothing, whatever they hold.
inline void expect_nothing_of_rows_without_weight(std::int64_t keys, const AddGradients& add) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Random random(71);
  AttentionProblem problem = problem_of({2, 20, keys, 2, 1, 4, 4});
  problem.bias = Extents{1, 1, 20, keys};
  problem.mask.set_kv_lengths({0, static_cast<std::int32_t>(keys)});
  WholeAttention operands = random_attention(random, problem);
  for (std::int64_t j = 0; j < keys; ++j) {
    operands.bias.view().at<float>({0, 0, 7, j}) = -kInfinity;
  }
  const WholeGradients whole(random, std::move(operands));
  for (std::int64_t t = 0; t < 20; ++t) {
    for (std::int64_t b = 0; b < 2; ++b) {
      if (b == 1 && t != 7) continue;
      for (std::int64_t d = 0; d < 4; ++d) {
        whole.grad_output.view().at<float>({b, t, 1, d}) = kNan;
        whole.forward.query.view().at<float>({b, t, 1, d}) = kNan;
      }
    }
  }
  for (std::int64_t j = 0; j < keys; ++j) {
    whole.forward.key.view().at<float>({0, j, 0, 2}) = kInfinity;
  }
  add(whole, whole.block(), whole.gradients());
  EXPECT_LT(whole.largest_share(), 0.5);
}

/// 64 combinations of modifiers of the problem for each dtype.
inline void expect_right_modifiers(const AttentionShape& shape, const AddGradients& add,
                                   const std::vector<DType>& dtypes) {
  Random random(63);
  for (const DType dtype : dtypes) {
    for (unsigned chosen = 0; chosen < 64; ++chosen) {
      SCOPED_TRACE(std::string(name_of(dtype)) + ' ' + std::to_string(chosen));
      const auto has = [&](unsigned bit) { return (chosen >> bit & 1U) != 0; };
      AttentionProblem problem = problem_of(shape, dtype);
      problem.mask.set_causal(has(0));
      problem.mask.set_offset(has(0) ? shape.kv_length / 2 : 0);
      if (has(1)) problem.scale = -0.6;
      if (has(2)) problem.soft_cap = 1.5;
      if (has(3)) problem.dropout.emplace(0.3, (std::uint64_t{5} << 32U) + chosen);
      if (has(4)) {
        const Extents scores{shape.batch, shape.heads, shape.query_length, shape.kv_length};
        problem.bias = scores;
        for (int dim = 0; dim < 4; ++dim) {
          if (draw(random, 0, 1) == 0) (*problem.bias)[dim] = 1;
        }
        problem.dense_mask = Extents{1, scores[1], scores[2], scores[3]};
      }
      if (has(5)) problem.sinks = Sinks::random(shape.heads, 2, chosen);
      const WholeGradients whole(random, problem);
      add(whole, whole.block(), whole.gradients());
      EXPECT_LT(whole.largest_share(), 0.5);
    }
  }
}

/// Blocks of rows, columns, batches and heads, with positions far from each other, add up.
inline void expect_blocks_add_up(const AddGradients& add) {
  Random random(53);
  AttentionProblem problem = causal_problem_of({3, 24, 32, 4, 2, 8, 8}, DType::float32, 5);
  problem.dropout.emplace(0.2, 7);
  problem.bias = Extents{1, 4, 24, 1};
  problem.sinks = Sinks::random(4, 1, 3);
  const WholeGradients whole(random, problem);
  const BackwardBlock all = whole.block();
  const Gradients gradients = whole.gradients();
  const std::vector<PositionRanges> rows{PositionRanges({PositionRange{GlobalPosition(0), 12, 2}}),
                                         PositionRanges({PositionRange{GlobalPosition(1), 12, 2}})};
  const std::vector<PositionRanges> columns{
      PositionRanges({PositionRange{GlobalPosition(24), 8}, PositionRange{GlobalPosition(0), 8}}),
      PositionRanges({PositionRange{GlobalPosition(8), 16}})};
  // Views of positions that are one range; copies of positions in several ranges.
  const auto stepped = [](const auto& view, int dim, std::int64_t first) {
    auto strides = view.strides();
    auto shape = view.shape();
    strides[dim] *= 2;
    shape[dim] = 12;
    return std::decay_t<decltype(view)>(view.slice(dim, first, 1).data(), view.dtype(), shape,
                                        strides);
  };
  for (std::int64_t b = 0; b < 3; ++b) {
    for (std::int64_t k = 0; k < 2; ++k) {
      for (std::size_t r = 0; r < 2; ++r) {
        for (const PositionRanges& held : columns) {
          const auto of_rows = [&](const auto& view) {
            return stepped(view.slice(0, b, 1).slice(2, k * 2, 2), 1, static_cast<std::int64_t>(r));
          };
          const auto of_lse = [&](const auto& view) {
            return stepped(view.slice(0, b, 1).slice(1, k * 2, 2), 2, static_cast<std::int64_t>(r));
          };
          const auto of_keys = [&](const ConstTensorView& view) {
            return gather(view.slice(0, b, 1).slice(2, k, 1), held);
          };
          const Tensor key = of_keys(all.key);
          const Tensor value = of_keys(all.value);
          const Tensor grad_key = zeros(DType::float32, key.shape());
          const Tensor grad_value = zeros(DType::float32, value.shape());
          BackwardBlock block{
              of_rows(all.query), as_bthd(key),      as_bthd(value), of_rows(all.grad_output),
              of_lse(all.lse),    of_lse(all.delta), rows[r],        held};
          block.first_batch = b;
          block.first_head = k * 2;
          const ScoreTensors scores = all.scores.slice(0, b, 1).slice(1, k * 2, 2);
          block.scores.bias = stepped(*scores.bias, 2, static_cast<std::int64_t>(r));
          Gradients part{of_rows(gradients.query), as_bthd(grad_key), as_bthd(grad_value)};
          part.bias = stepped(gradients.bias.slice(0, b, 1).slice(1, k * 2, 2), 2,
                              static_cast<std::int64_t>(r));
          add(whole, block, part);
          for (std::int64_t j = 0; j < held.size(); ++j) {
            const std::int64_t position = held.global(LocalPosition(j)).value();
            for (std::int64_t d = 0; d < 8; ++d) {
              gradients.key.at<float>({b, position, k, d}) += part.key.at<float>({0, j, 0, d});
              gradients.value.at<float>({b, position, k, d}) += part.value.at<float>({0, j, 0, d});
            }
          }
        }
      }
    }
  }
  EXPECT_LT(whole.largest_share(), 0.5);
}

/// Keys and values that no row sees, and rows that see no key, hold NaN or infinities.
inline void expect_nothing_of_hidden_values(std::int64_t length, std::int64_t dim,
                                            std::int64_t value_dim, DType dtype,
                                            const AddGradients& add, double largest_share) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  Random random(93);
  for (const float x : {kNan, -std::numeric_limits<float>::infinity()}) {
    SCOPED_TRACE(std::to_string(dim) + ' ' + std::to_string(value_dim) + ' ' +
                 std::string(name_of(dtype)) + ' ' + std::to_string(x));
    AttentionProblem problem = causal_problem_of({2, length, length, 4, 2, dim, value_dim}, dtype,
                                                 -20);  // 20 rows see nothing
    const std::int64_t shorter = length / 3 + 37;
    problem.mask.set_kv_lengths(
        {static_cast<std::int32_t>(length), static_cast<std::int32_t>(shorter)});
    WholeAttention forward = random_operands(random, problem);
    for (std::int64_t p = 0; p < 20; ++p) {
      fill(forward.query, p, x);
      fill(forward.key, length - 20 + p, x);
      fill(forward.value, length - 20 + p, x);
    }
    for (std::int64_t p = shorter; p < length; ++p) {
      fill(forward.key, p, x, {}, 1);
      fill(forward.value, p, x, {}, 1);
    }
    const WholeGradients whole(random, std::move(forward));
    for (std::int64_t p = 0; p < 20; ++p) fill(whole.grad_output, p, x);
    for (std::int64_t n = 0; n < 4; ++n) whole.delta.view().at<float>({0, n, 5}) = kNan;
    add(whole, whole.block(), whole.gradients());
    expect_same_reach(whole);
    EXPECT_LT(whole.largest_share(), largest_share);
  }
}

}  // namespace annulus::test
