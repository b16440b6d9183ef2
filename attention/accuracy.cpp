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
      return {1e-3, 1e-5};
    case DType::bfloat16:
      return {6e-3, 1e-5};
    default:
      throw InternalError("no accuracy bound for " + std::string(name_of(dtype)));
  }
}

namespace {

// The bound of normalised results: an unnormalised output comes with a sum in float32.
DType judged_dtype(const AttentionProblem& problem) {
  const bool sum_is_narrow = problem.dtype == DType::float64 && !problem.normalize_output;
  return sum_is_narrow ? DType::float32 : problem.dtype;
}

}  // namespace

AccuracyBound accuracy_bound(const AttentionProblem& problem) {
  const DType dtype = judged_dtype(problem);
  AccuracyBound bound = accuracy_bound(dtype, problem.shape.kv_length);
  // Kernels of half types may take an approximate tanh.
  if (problem.soft_cap && size_of(dtype) == 2) bound.lse = 2e-3;
  return bound;
}

RowBound row_bound(const AttentionProblem& problem, const RowTerms& terms, double output_norm) {
  const DType dtype = judged_dtype(problem);
  const AccuracyBound whole = accuracy_bound(problem);
  const double summed = unit_roundoff(dtype == DType::float64 ? dtype : DType::float32);
  // Results are rounded to the dtype, as are the weights of half types; float64 results have the
  // precision of the functions that they come from.
  const double rounded = dtype == DType::float64 ? whole.output : unit_roundoff(dtype);
  const double dot = std::sqrt(static_cast<double>(problem.shape.head_dim)) *
                     std::abs(problem.logit_scale()) * terms.largest_dot;
  // A logit is rounded with its bias, and again when the largest logit is subtracted and where exp
  // begins; tanh and its two factors take a few roundings more.
  const double logit_error = summed * (dot + 2 * terms.largest_bias + 8 * terms.largest_capped);
  // The error of outputs that are so small that float16 has fewer bits.
  const double subnormal = dtype == DType::float16
                               ? 0x1p-25 * std::sqrt(static_cast<double>(problem.shape.value_dim))
                               : 0;
  return {(kRowErrorFactor * rounded + logit_error) * (terms.root_square + output_norm) +
              8 * summed * terms.sum + kRowErrorFactor * subnormal,
          whole.lse + unit_roundoff(DType::float32) * dot};
}

double sharded_error_factor(std::int64_t output_rows) {
  return output_rows < 512 ? 2 : 1.1;
}

}  // namespace annulus
