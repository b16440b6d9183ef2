#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

constexpr double kEmpty = -std::numeric_limits<double>::infinity();

[[noreturn]] void refuse(const SoftmaxState& state, const char* why) {
  throw InternalError(
      std::string("combining softmax states: ") + why + ": " +
      std::string(name_of(state.output.dtype())) + " output " + to_string(state.output.shape()) +
      " strides " + to_string(state.output.strides()) + ", " +
      std::string(name_of(state.lse.dtype())) + " LSE " + to_string(state.lse.shape()));
}

void check_state(const SoftmaxState& state) {
  const Extents& output = state.output.shape();
  const bool fits = output.rank() == 4 &&
                    (state.lse.dtype() == DType::float32 || state.lse.dtype() == DType::float64) &&
                    state.lse.shape() == Extents{output[0], output[2], output[1]};
  if (!fits) refuse(state, "output and LSE do not fit");
  if (output[3] > 1 && state.output.stride(3) != 1) refuse(state, "the vectors have a stride");
  if (state.wants_maximum() &&
      (state.maximum.dtype() != DType::float32 || !(state.maximum.shape() == state.lse.shape()))) {
    refuse(state, "output and maximum do not fit");
  }
}

void check_part(const PartialState& part, const SoftmaxState& result) {
  check_state(part.state);
  if (result.wants_maximum() && !part.state.wants_maximum()) {
    refuse(part.state, "a part has no maximum");
  }
  const Extents& whole = result.output.shape();
  const Extents& own = part.state.output.shape();
  if (part.state.output.dtype() != partial_dtype(result.output.dtype())) {
    refuse(part.state, "a part is rounded");
  }
  if (own[0] != whole[0] || own[3] != whole[3] || part.first_row < 0 || part.first_head < 0 ||
      part.first_row + own[1] > whole[1] || part.first_head + own[2] > whole[2]) {
    refuse(part.state, "a part lies outside");
  }
}

// Calls body(b, t, n) for every row, in the order in which rows usually lie in memory.
template <class Body>
void for_each_row(const TensorView& output, const Body& body) {
  for (std::int64_t b = 0; b < output.size(0); ++b) {
    for (std::int64_t t = 0; t < output.size(1); ++t) {
      for (std::int64_t n = 0; n < output.size(2); ++n) body(b, t, n);
    }
  }
}

// row := weight · row + partial_weight · partial, rounded once.
template <class Real>
void blend(Real* __restrict row, double weight, const Real* __restrict partial,
           double partial_weight, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    row[i] = static_cast<Real>(weight * row[i] + partial_weight * partial[i]);
  }
}

// Merges a partial row into `row`; the LSE of both together.
template <class Real>
double blend_rows(Real* row, double lse, const Real* partial, double partial_lse,
                  std::int64_t count) {
  // The weights exp(lᵢ − l) follow from the difference of the LSEs alone. In float64 they cost
  // nothing beside the rows, and leave one rounding per element and merge. The smaller is not one
  // less the larger: it would lose digits beside large sinks.
  const double ahead = lse - partial_lse;
  const double smaller = std::exp(-std::abs(ahead));
  const double larger_weight = 1.0 / (1.0 + smaller);
  const double smaller_weight = smaller / (1.0 + smaller);
  if (ahead > 0) {
    blend(row, larger_weight, partial, smaller_weight, count);
  } else {
    blend(row, smaller_weight, partial, larger_weight, count);
  }
  return std::max(lse, partial_lse) + std::log1p(smaller);
}

void round_row(const float* row, DType dtype, void* target, std::int64_t count) {
  from_float32(row, dtype, target, count);
}
void round_row(const double* row, DType /*float64*/, void* target, std::int64_t count) {
  std::copy_n(row, count, static_cast<double*>(target));
}

// The largest logit of the parts that cover a row, whose LSE all together is `lse`.
double maximum_of(std::span<const PartialState> parts, std::int64_t b, std::int64_t t,
                  std::int64_t n, double lse) {
  if (std::isnan(lse)) return lse;
  float maximum = -std::numeric_limits<float>::infinity();
  for (const PartialState& part : parts) {
    if (!part.covers(t, n)) continue;
    maximum = std::max(maximum,
                       part.state.maximum.at<float>({b, n - part.first_head, t - part.first_row}));
  }
  return maximum;
}

template <class Real>
void combine_as(std::span<const PartialState> parts, const SoftmaxState& result, SoftmaxForm form) {
  const std::int64_t dim = result.output.size(3);
  std::vector<Real> scratch(static_cast<std::size_t>(dim));
  for_each_row(result.output, [&](std::int64_t b, std::int64_t t, std::int64_t n) {
    double lse = kEmpty;
    const Real* sum = nullptr;  // the merged output so far: that of one part, or `scratch`
    Real nothing = 0;           // the output if no part has weight
    for (const PartialState& part : parts) {
      if (!part.covers(t, n)) continue;
      const std::int64_t row = t - part.first_row;
      const std::int64_t head = n - part.first_head;
      const double part_lse = part.state.lse_at(b, head, row);
      const auto* values = static_cast<const Real*>(part.state.output.address({b, row, head}));
      if (part_lse == kEmpty) {
        if (dim > 0 && std::isnan(*values)) nothing = *values;
        continue;
      }
      if (sum == nullptr) {
        sum = values;
        lse = part_lse;
        continue;
      }
      if (sum != scratch.data()) std::copy_n(sum, dim, scratch.data());
      sum = scratch.data();
      lse = blend_rows(scratch.data(), lse, values, part_lse, dim);
    }
    void* target = result.output.address({b, t, n});
    if (sum == nullptr) {
      std::fill(scratch.begin(), scratch.end(), nothing);
      sum = scratch.data();
    }
    const double maximum = result.wants_maximum() ? maximum_of(parts, b, t, n, lse) : kEmpty;
    double total = lse;  // or the sum of the exponentials
    if (form == SoftmaxForm::unnormalised) {
      total = lse == kEmpty ? 0 : std::exp(lse - maximum);
      if (lse != kEmpty) {
        std::transform(sum, sum + dim, scratch.data(),
                       [total](Real value) { return static_cast<Real>(total * value); });
        sum = scratch.data();
      }
    }
    if (sum != target) round_row(sum, result.output.dtype(), target, dim);
    result.set_lse_at(b, n, t, total);
    if (result.wants_maximum()) {
      result.maximum.at<float>({b, n, t}) = static_cast<float>(maximum);
    }
  });
}

}  // namespace

void combine(std::span<const PartialState> parts, const SoftmaxState& result, SoftmaxForm form) {
  check_state(result);
  if (form == SoftmaxForm::unnormalised && !result.wants_maximum()) {
    refuse(result, "an unnormalised result without a maximum");
  }
  for (const PartialState& part : parts) check_part(part, result);
  if (result.output.dtype() == DType::float64) {
    combine_as<double>(parts, result, form);
  } else {
    combine_as<float>(parts, result, form);
  }
}

}  // namespace annulus
