#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

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

// True if the product stays below `bound`. A size of 0 counts as 1: strides and parts of the
// product leave it out.
bool product_is_below(std::int64_t bound, std::initializer_list<std::int64_t> sizes) {
  std::int64_t product = 1;
  for (const std::int64_t size : sizes) {
    const std::int64_t factor = std::max<std::int64_t>(size, 1);
    if (product > (bound - 1) / factor) return false;
    product *= factor;
  }
  return true;
}

void check_scores(const char* name, const std::optional<Extents>& scores,
                  const AttentionShape& shape) {
  if (!scores) return;
  const Extents whole{shape.batch, shape.heads, shape.query_length, shape.kv_length};
  bool fits = scores->rank() == whole.rank();
  for (int dim = 0; fits && dim < whole.rank(); ++dim) {
    fits = (*scores)[dim] == 1 || (*scores)[dim] == whole[dim];
  }
  if (!fits) {
    throw ArgumentError(name, "shape " + to_string(*scores),
                        "broadcastable to [B,N,T,S] = " + to_string(whole));
  }
  const Extents& s = *scores;
  if (!product_is_below(std::int64_t{1} << 60, {s[0], s[1], s[2], s[3]})) {
    throw ArgumentError(name, "shape " + to_string(s), "fewer than 2^60 elements");
  }
}

}  // namespace

std::string to_string(const AttentionShape& shape) {
  return fmt::format("B={} T={} S={} N={} K={} D={} Dv={}", shape.batch, shape.query_length,
                     shape.kv_length, shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim);
}

std::string_view name_of(Reproducible reproducible) noexcept {
  switch (reproducible) {
    case Reproducible::no:
      return "no";
    case Reproducible::run:
      return "run";
    case Reproducible::world:
      return "world";
  }
  return "unknown";
}

double AttentionProblem::logit_scale() const {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(shape.head_dim)));
}

void AttentionShape::validate() const {
  check_at_least("batch B", batch, 0);
  check_at_least("query length T", query_length, 0);
  check_at_least("key/value length S", kv_length, 0);
  check_at_least("query heads N", heads, 1);
  check_at_least("key/value heads K", kv_heads, 1);
  check_at_least("head dimension D", head_dim, 1);
  check_at_least("value head dimension Dv", value_dim, 1);
  if (heads % kv_heads != 0) {
    throw ArgumentError("query heads N", std::to_string(heads),
                        fmt::format("a multiple of the {} key/value heads", kv_heads));
  }
  constexpr std::int64_t kElements = std::int64_t{1} << 60;
  if (!product_is_below(kElements, {batch, query_length, heads, std::max(head_dim, value_dim)}) ||
      !product_is_below(kElements, {batch, kv_length, kv_heads, std::max(head_dim, value_dim)})) {
    throw ArgumentError("shape", to_string(*this), "tensors of fewer than 2^60 elements");
  }
  // Counting them under a diagonal doubles them on the way.
  if (!product_is_below(std::int64_t{1} << 62, {batch, query_length, kv_length})) {
    throw ArgumentError("shape", to_string(*this), "fewer than 2^62 pairs of a query and a key");
  }
}

void AttentionProblem::validate() const {
  shape.validate();
  if (!is_floating(dtype)) {
    throw ArgumentError("dtype", std::string(name_of(dtype)),
                        "float16, bfloat16, float32 or float64");
  }
  if (softmax_dtype != DType::float32 && softmax_dtype != DType::float64) {
    throw ArgumentError("softmax dtype", std::string(name_of(softmax_dtype)), "float32 or float64");
  }
  // Kernels compute with them in float32.
  using Float = std::numeric_limits<float>;
  if (scale && !(std::abs(*scale) <= Float::max())) {
    throw ArgumentError("scale", fmt::format("{}", *scale), "a number that is finite in float32");
  }
  if (soft_cap && !(*soft_cap >= Float::min() && *soft_cap <= Float::max())) {
    throw ArgumentError("soft cap", fmt::format("{}", *soft_cap),
                        fmt::format("a positive number in float32's normal range, {:.2g} to {:.2g}",
                                    Float::min(), Float::max()));
  }
  mask.validate(shape.batch, shape.heads, shape.query_length, shape.kv_length);
  if (sinks) sinks->validate(shape.heads);
  check_scores("bias", bias, shape);
  check_scores("dense mask", dense_mask, shape);
  if (weights && !normalize_output) {
    throw ArgumentError("normalize_output", "false",
                        "true if attention weights are wanted, as they are normalised");
  }
  if (call_arguments.dropout_seed && !dropout) {
    throw ArgumentError("call arguments", to_string(call_arguments),
                        "no dropout seed, as there is no dropout");
  }
  if (call_arguments.offsets && mask.has_packings()) {
    throw ArgumentError("call arguments", to_string(call_arguments),
                        "no offsets with two packings, whose alignment replaces them");
  }
  const std::int64_t largest =
      std::max({shape.batch, shape.query_length, shape.kv_length, shape.heads});
  if (dropout && largest >= Dropout::kMaximumIndices) {
    throw ArgumentError("dropout", to_string(shape), "sequences, heads and batches below 2^32");
  }
}

std::string to_string(const CallArguments& arguments) {
  std::string text;
  const auto add = [&text](bool named, const char* name) {
    if (named) text += (text.empty() ? "" : ", ") + std::string(name);
  };
  add(arguments.lengths, "lengths");
  add(arguments.offsets, "offsets");
  add(arguments.dropout_seed, "dropout seed");
  return text.empty() ? "none" : text;
}

AttentionProblem bound_of(AttentionProblem problem) {
  if (!problem.call_arguments.offsets) return problem;
  Mask& mask = problem.mask;
  mask.set_causal(false);
  mask.set_window(-1, -1);
  mask.set_chunk(0);
  mask.set_sink_tokens(0);
  mask.set_prefix(0);
  mask.set_offset(0);
  return problem;
}

double forward_flops(const AttentionShape& shape, double visible_pairs) {
  return 2.0 * visible_pairs * static_cast<double>(shape.heads) *
         static_cast<double>(shape.head_dim + shape.value_dim);
}

}  // namespace annulus
