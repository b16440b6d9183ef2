#include "tests/attention/references/comparison.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/accuracy.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/core/error.hpp>

#include "tests/support/for_each_index.hpp"

namespace annulus::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<double> doubles(const ConstTensorView& view) {
  std::vector<float> values(static_cast<std::size_t>(view.elements()));
  to_float32(view.data(), view.dtype(), values.data(), view.elements());
  return {values.begin(), values.end()};
}

// Calls use(b, t, n, row of output, entry of lse) for all rows.
template <class Use>
void for_each_row(const AttentionShape& shape, const Use& use) {
  for_each_of<3>({shape.batch, shape.query_length, shape.heads}, [&](auto b, auto t, auto n) {
    use(b, t, n, static_cast<std::size_t>((b * shape.query_length + t) * shape.heads + n),
        static_cast<std::size_t>((b * shape.heads + n) * shape.query_length + t));
  });
}

double element_bound(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return 4e-3;
    case DType::bfloat16:
      return 3e-2;
    default:
      return 1e-5;
  }
}

// The largest sum of |query| · |key| over the head dimension: how much of a logit rounding can
// move.
double largest_dot_product(const ReferenceCase& reference) {
  const AttentionShape& shape = reference.problem.shape;
  const std::vector<double> query = doubles(reference.query.view());
  const std::vector<double> key = doubles(reference.key.view());
  const auto dim = static_cast<std::size_t>(shape.head_dim);
  double largest = 0;
  for_each_row(shape, [&](std::int64_t b, std::int64_t /*t*/, std::int64_t n, std::size_t row,
                          std::size_t /*entry*/) {
    for (std::int64_t j = 0; j < shape.kv_length; ++j) {
      const auto column = static_cast<std::size_t>((b * shape.kv_length + j) * shape.kv_heads +
                                                   n / shape.heads_per_kv_head());
      double sum = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        sum += std::abs(query[row * dim + d] * key[column * dim + d]);
      }
      largest = std::max(largest, sum);
    }
  });
  return largest;
}

}  // namespace

bool sees_nothing(const ReferenceCase& reference, std::int64_t b, std::int64_t n, std::int64_t t) {
  const ScoreTensors scores = reference.scores(reference.problem);
  for (std::int64_t j = 0; j < reference.problem.shape.kv_length; ++j) {
    const GlobalPosition column(j);
    if (reference.problem.mask.visible(b, n, GlobalPosition(t), column) &&
        scores.shows(b, n, t, j)) {
      return false;
    }
  }
  return true;
}

void expect_documented_empty_rows(const ReferenceCase& reference) {
  const AttentionShape& shape = reference.problem.shape;
  const Mask& mask = reference.problem.mask;
  const auto dim = static_cast<std::size_t>(shape.value_dim);
  const std::vector<double> output = doubles(reference.output.view());
  const std::vector<double> value = doubles(reference.value.view());
  int empty = 0;
  for_each_row(shape, [&](std::int64_t b, std::int64_t t, std::int64_t n, std::size_t row,
                          std::size_t entry) {
    if (!sees_nothing(reference, b, n, t)) return;
    ++empty;
    const auto& lengths = mask.query_lengths();
    const bool padding = !lengths.empty() && t >= lengths[static_cast<std::size_t>(b)];
    for (std::size_t d = 0; d < dim; ++d) {
      double sum = 0;
      for (std::int64_t j = 0; j < shape.kv_length; ++j) {
        const std::int64_t key =
            (b * shape.kv_length + j) * shape.kv_heads + n / shape.heads_per_kv_head();
        sum += value[static_cast<std::size_t>(key) * dim + d];
      }
      const double mean = padding ? 0 : sum / static_cast<double>(shape.kv_length);
      EXPECT_NEAR(output[row * dim + d], mean, element_bound(reference.problem.dtype));
    }
    if (reference.lse) {
      const float lse = reference.lse->view().as<float>()[entry];
      EXPECT_TRUE(std::isfinite(lse) && lse < -2e38F) << lse;
    }
  });
  EXPECT_GT(empty, 0) << "the case is said to have rows that see nothing";
}

OracleOutput expected_of(const ReferenceCase& reference) {
  const AttentionShape& shape = reference.problem.shape;
  OracleOutput result{doubles(reference.output.view()), {}};
  result.lse = reference.lse
                   ? doubles(reference.lse->view())
                   : std::vector<double>(
                         static_cast<std::size_t>(shape.batch * shape.heads * shape.query_length),
                         std::nan(""));
  if (!reference.differs_in_empty_rows) return result;
  for_each_row(shape, [&](std::int64_t b, std::int64_t t, std::int64_t n, std::size_t row,
                          std::size_t entry) {
    if (!sees_nothing(reference, b, n, t)) return;
    std::fill_n(result.output.begin() + static_cast<std::ptrdiff_t>(row) * shape.value_dim,
                shape.value_dim, 0.0);
    result.lse[entry] = -kInfinity;
  });
  return result;
}

OracleOutput part_of(const OracleOutput& whole, const AttentionShape& shape,
                     std::span<const PositionRanges> index) {
  const AttentionShape local{index[0].size(), index[1].size(), 0, index[2].size()};
  const auto dim = static_cast<std::size_t>(shape.value_dim);
  const auto rows = static_cast<std::size_t>(local.batch * local.query_length * local.heads);
  OracleOutput part{std::vector<double>(rows * dim), std::vector<double>(rows)};
  const auto global = [&](std::size_t axis, std::int64_t local_position) {
    return index[axis].global(LocalPosition(local_position)).value();
  };
  for_each_row(local, [&](std::int64_t b, std::int64_t t, std::int64_t n, std::size_t row,
                          std::size_t entry) {
    const std::int64_t batch = global(0, b);
    const std::int64_t position = global(1, t);
    const std::int64_t head = global(2, n);
    const std::int64_t from = (batch * shape.query_length + position) * shape.heads + head;
    std::copy_n(whole.output.begin() + from * shape.value_dim, dim,
                part.output.begin() + static_cast<std::ptrdiff_t>(row * dim));
    part.lse[entry] = whole.lse[static_cast<std::size_t>(
        (batch * shape.heads + head) * shape.query_length + position)];
  });
  return part;
}

OracleOutput numbers_of(const ConstTensorView& output, const ConstTensorView& lse, DType dtype) {
  if (output.dtype() == dtype) return {doubles(output), doubles(lse)};
  std::vector<std::byte> rounded(static_cast<std::size_t>(output.elements()) * size_of(dtype));
  from_float32(output.as<float>(), dtype, rounded.data(), output.elements());
  return {doubles({rounded.data(), dtype, output.shape()}), doubles(lse)};
}

ReferenceDeviation deviation(const OracleOutput& actual, const OracleOutput& expected,
                             DType lse_dtype) {
  if (actual.output.size() != expected.output.size() || actual.lse.size() != expected.lse.size()) {
    throw InternalError("results compared with those of other rows");
  }
  ReferenceDeviation result;
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < expected.output.size(); ++i) {
    const double miss = std::abs(actual.output[i] - expected.output[i]);
    difference += miss * miss;
    norm += expected.output[i] * expected.output[i];
    result.element = std::isnan(miss) ? kInfinity : std::max(result.element, miss);
  }
  if (difference != 0) result.output = norm > 0 ? std::sqrt(difference / norm) : kInfinity;
  for (std::size_t i = 0; i < expected.lse.size(); ++i) {
    const double lse = expected.lse[i];
    if (std::isnan(lse) || actual.lse[i] == lse) continue;  // −∞ equals −∞
    const double rounding = lse_dtype == DType::float32 ? 0 : unit_roundoff(lse_dtype);
    const double miss = std::abs(actual.lse[i] - lse) - rounding * std::abs(lse);
    result.lse = std::isfinite(miss) ? std::max(result.lse, miss) : kInfinity;
  }
  return result;
}

ReferenceDeviation bound_of(const ReferenceCase& reference) {
  const AttentionProblem& problem = reference.problem;
  const AccuracyBound bound = accuracy_bound(problem);
  const double lse = std::sqrt(problem.shape.head_dim) * unit_roundoff(DType::float32) *
                     std::abs(problem.logit_scale()) * largest_dot_product(reference);
  return {bound.output, element_bound(problem.dtype), bound.lse + lse};
}

bool agrees(const ReferenceDeviation& deviation, const ReferenceDeviation& bound) {
  return deviation.output <= bound.output && deviation.element <= bound.element &&
         deviation.lse <= bound.lse;
}

void expect_agrees(const OracleOutput& actual, const OracleOutput& expected,
                   const ReferenceCase& reference) {
  const ReferenceDeviation found = deviation(actual, expected, reference.lse_dtype);
  const ReferenceDeviation bound = bound_of(reference);
  EXPECT_TRUE(agrees(found, bound))
      << reference.name << ": output " << found.output << " (bound " << bound.output
      << "), an element " << found.element << " (" << bound.element << "), LSE " << found.lse
      << " (" << bound.lse << ")";
}

}  // namespace annulus::test
