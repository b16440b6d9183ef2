#include <cmath>

#include <fmt/format.h>

#include <annulus/attention/problem.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

void check_at_least(const char* name, std::int64_t value, std::int64_t bound) {
  if (value < bound) {
    throw ArgumentError(name, std::to_string(value), fmt::format("at least {}", bound));
  }
}

}  // namespace

std::string to_string(const AttentionShape& shape) {
  return fmt::format("B={} T={} S={} N={} K={} D={} Dv={}", shape.batch, shape.query_length,
                     shape.kv_length, shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim);
}

double AttentionProblem::logit_scale() const {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(shape.head_dim)));
}

void AttentionProblem::validate() const {
  check_at_least("batch B", shape.batch, 0);
  check_at_least("query length T", shape.query_length, 0);
  check_at_least("key/value length S", shape.kv_length, 0);
  check_at_least("query heads N", shape.heads, 1);
  check_at_least("key/value heads K", shape.kv_heads, 1);
  check_at_least("head dimension D", shape.head_dim, 1);
  check_at_least("value head dimension Dv", shape.value_dim, 1);
  if (shape.heads % shape.kv_heads != 0) {
    throw ArgumentError("query heads N", std::to_string(shape.heads),
                        fmt::format("a multiple of the {} key/value heads", shape.kv_heads));
  }
  if (dtype != DType::float16 && dtype != DType::bfloat16 && dtype != DType::float32) {
    throw ArgumentError("dtype", std::string(name_of(dtype)), "float16, bfloat16 or float32");
  }
  if (scale && !std::isfinite(*scale)) {
    throw ArgumentError("scale", fmt::format("{}", *scale), "a finite number");
  }
  if (soft_cap && !(std::isfinite(*soft_cap) && *soft_cap > 0)) {
    throw ArgumentError("soft cap", fmt::format("{}", *soft_cap), "a positive finite number");
  }
  mask.validate(shape.batch, shape.query_length, shape.kv_length);
}

double forward_flops(const AttentionShape& shape, double visible_pairs) {
  return 2.0 * visible_pairs * static_cast<double>(shape.heads) *
         static_cast<double>(shape.head_dim + shape.value_dim);
}

}  // namespace annulus
