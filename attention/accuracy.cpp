#include <algorithm>
#include <cmath>
#include <string>

#include <annulus/attention/accuracy.hpp>
#include <annulus/core/error.hpp>

namespace annulus {

AccuracyBound accuracy_bound(DType dtype, std::int64_t kv_length) {
  const double growth =
      std::sqrt(std::log2(static_cast<double>(std::max<std::int64_t>(kv_length, 2))));
  switch (dtype) {
    case DType::float64:
      return {1e-14 * growth, 1e-5};
    case DType::float32:
      return {2e-6 * growth, 1e-5};
    case DType::float16:
      return {1e-3, 2e-3};
    case DType::bfloat16:
      return {6e-3, 2e-3};
    default:
      throw InternalError("no accuracy bound for " + std::string(name_of(dtype)));
  }
}

AccuracyBound accuracy_bound(const AttentionProblem& problem) {
  const bool sum_is_narrow = problem.dtype == DType::float64 && !problem.normalize_output;
  return accuracy_bound(sum_is_narrow ? DType::float32 : problem.dtype, problem.shape.kv_length);
}

double sharded_error_factor(std::int64_t output_elements) {
  return output_elements < 4096 ? 1.5 : 1.1;
}

}  // namespace annulus
