#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <annulus/core/convert.hpp>
#include <annulus/core/error.hpp>
#include <annulus/verification/comparison.hpp>

namespace annulus::verification {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The larger one; NaN if either is.
double worse(double a, double b) {
  return std::isnan(a) || a > b ? a : b;
}

double lse_deviation(double truth, double lse) {
  if (truth == -kInfinity || lse == -kInfinity) return truth == lse ? 0 : kInfinity;
  return std::abs(lse - truth);
}

}  // namespace

void Deviation::add(const Deviation& other) {
  difference += other.difference;
  reference += other.reference;
  lse = worse(other.lse, lse);
}

Deviation compare(const OracleOutput& truth, const ConstTensorView& output,
                  const ConstTensorView& lse) {
  const Extents& shape = output.shape();
  if (shape.rank() != 4 || !(lse.shape() == Extents{shape[0], shape[2], shape[1]}) ||
      static_cast<std::int64_t>(truth.output.size()) != output.elements() ||
      static_cast<std::int64_t>(truth.lse.size()) != lse.elements()) {
    throw InternalError("output " + to_string(shape) + " with LSE " + to_string(lse.shape()) +
                        " compared with an oracle's output of other rows");
  }
  const std::int64_t dim = shape[3];
  std::vector<float> row(static_cast<std::size_t>(dim));
  Deviation result;
  const double* expected = truth.output.data();
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t t = 0; t < shape[1]; ++t) {
      for (std::int64_t n = 0; n < shape[2]; ++n, expected += dim) {
        const double true_lse =
            truth.lse[static_cast<std::size_t>((b * shape[2] + n) * shape[1] + t)];
        to_float32(output.address({b, t, n}), output.dtype(), row.data(), dim);
        double difference = 0;
        for (std::int64_t d = 0; d < dim; ++d) {
          const double deviation = row[static_cast<std::size_t>(d)] - expected[d];
          difference += deviation * deviation;
          result.reference += expected[d] * expected[d];
        }
        const bool sees_nothing = true_lse == -kInfinity;
        result.difference += sees_nothing && difference != 0 ? kInfinity * difference : difference;
        result.lse = worse(lse_deviation(true_lse, lse.at<float>({b, n, t})), result.lse);
      }
    }
  }
  return result;
}

Accuracy accuracy(const Deviation& local, Control& group) {
  const std::vector<double> sums = group.sum(std::vector{local.difference, local.reference});
  const double relative = std::sqrt(sums[0] / sums[1]);
  return {sums[0] == 0 ? 0 : relative, group.max(std::vector{local.lse})[0]};
}

}  // namespace annulus::verification
