#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include <annulus/core/error.hpp>
#include <annulus/verification/comparison.hpp>

#include "entries.hpp"

namespace annulus::verification {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The deviation of an LSE or a maximum.
double row_deviation(double truth, double value) {
  if (std::isnan(truth)) return std::isnan(value) ? 0 : kInfinity;
  if (std::isinf(truth) || value == -kInfinity) return truth == value ? 0 : kInfinity;
  return std::abs(value - truth);
}

// The deviation of an output element whose truth is NaN or infinite. Partial results whose weight
// underflows turn an infinity into NaN, so NaN is accepted for an infinity.
double non_finite_deviation(double truth, double value) {
  return std::isnan(value) || truth == value ? 0 : kInfinity;
}

}  // namespace

void Deviation::add(const Deviation& other) {
  difference += other.difference;
  reference += other.reference;
  rows += other.rows;
  lse = worse(other.lse, lse);
  row_share = worse(other.row_share, row_share);
  lse_share = worse(other.lse_share, lse_share);
}

namespace {

// No error is a share of 0 even if the bound is 0.
double share_of(double error, double bound) {
  return error == 0 ? 0 : error / bound;
}

// The results of one row, apart from its output.
struct Row {
  double scale = 1;  // of the output
  double lse = 0;
  std::optional<double> maximum = {};
};

// `row_of`(b, n, t) returns the computed results of a row; `rows` is the shape of the tensors that
// it reads.
template <class RowOf>
Deviation compare_rows(const AttentionProblem& problem, const OracleOutput& truth,
                       const ConstTensorView& output, const Extents& rows, const RowOf& row_of) {
  const Extents& shape = output.shape();
  if (shape.rank() != 4 || !(rows == Extents{shape[0], shape[2], shape[1]}) ||
      static_cast<std::int64_t>(truth.output.size()) != output.elements() ||
      static_cast<std::int64_t>(truth.lse.size()) != rows.product() ||
      truth.terms.size() != truth.lse.size()) {
    throw InternalError("output " + to_string(shape) + " with LSE " + to_string(rows) +
                        " compared with an oracle's output of other rows");
  }
  const std::int64_t dim = shape[3];
  std::vector<double> values(static_cast<std::size_t>(dim));
  Deviation result;
  const double* expected = truth.output.data();
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t t = 0; t < shape[1]; ++t) {
      for (std::int64_t n = 0; n < shape[2]; ++n, expected += dim) {
        const auto index = static_cast<std::size_t>((b * shape[2] + n) * shape[1] + t);
        const double true_lse = truth.lse[index];
        const Row row = row_of(b, n, t);
        widen(output.address({b, t, n}), output.dtype(), values);
        double difference = 0;
        double reference = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          const double value = values[static_cast<std::size_t>(d)];
          if (!std::isfinite(expected[d])) {
            difference += non_finite_deviation(expected[d], value);
            continue;
          }
          const double deviation = row.scale * value - expected[d];
          difference += deviation * deviation;
          reference += expected[d] * expected[d];
        }
        const bool sees_nothing = true_lse == -kInfinity;
        if (sees_nothing && difference != 0) difference *= kInfinity;
        double lse = row_deviation(true_lse, row.lse);
        if (row.maximum) lse = worse(row_deviation(truth.maximum[index], *row.maximum), lse);
        const RowBound bound = row_bound(problem, truth.terms[index], std::sqrt(reference));
        result.add({difference, reference, lse, share_of(std::sqrt(difference), bound.output),
                    share_of(lse, bound.lse), reference > 0 ? 1.0 : 0.0});
      }
    }
  }
  return result;
}

}  // namespace

Deviation compare(const AttentionProblem& problem, const OracleOutput& truth,
                  const ConstTensorView& output, const ConstTensorView& lse) {
  return compare_rows(problem, truth, output, lse.shape(),
                      [&](std::int64_t b, std::int64_t n, std::int64_t t) {
                        return Row{1, lse.at<float>({b, n, t})};
                      });
}

Deviation compare(const AttentionProblem& problem, const OracleOutput& truth,
                  const ConstTensorView& output, const ConstTensorView& maximum,
                  const ConstTensorView& sum) {
  if (!(maximum.shape() == sum.shape()) || truth.maximum.size() != truth.lse.size()) {
    throw InternalError("maximum " + to_string(maximum.shape()) + " with sum " +
                        to_string(sum.shape()) + " compared with an oracle's maxima of other rows");
  }
  return compare_rows(problem, truth, output, sum.shape(),
                      [&](std::int64_t b, std::int64_t n, std::int64_t t) {
                        const double largest = maximum.at<float>({b, n, t});
                        const double total = sum.at<float>({b, n, t});
                        // A row that sees nothing, or is NaN, must be so in both its maximum and
                        // its sum.
                        if (std::isnan(total) != std::isnan(largest)) {
                          return Row{1, kInfinity, largest};
                        }
                        if (total == 0 || largest == -kInfinity) {
                          const bool nothing = total == 0 && largest == -kInfinity;
                          return Row{1, nothing ? -kInfinity : kInfinity, largest};
                        }
                        return Row{1 / total, largest + std::log(total), largest};
                      });
}

Accuracy accuracy(const Deviation& local, Control& group) {
  const std::vector<double> sums =
      group.sum(std::vector{local.difference, local.reference, local.rows}, "errors of the output");
  const std::vector<double> largest = group.max(
      std::vector{local.lse, local.row_share, local.lse_share}, "errors of the LSE and of rows");
  const double relative = std::sqrt(sums[0] / sums[1]);
  return {sums[0] == 0 ? 0 : relative, largest[0], largest[1], largest[2], sums[2]};
}

}  // namespace annulus::verification
