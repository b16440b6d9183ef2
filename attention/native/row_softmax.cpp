#include "native/row_softmax.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

// Highway compiles the part below once per instruction set and picks one at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "native/row_softmax.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// After highway.h, once per instruction set.
#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace annulus::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::CappedTag<float, kRowAlignment>;

void cap_vectors(float* HWY_RESTRICT logits, std::int64_t count, float cap) {
  const Tag f32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  const auto scale = hn::Set(f32, cap);
  const auto inverse = hn::Set(f32, 1.0F / cap);
  for (std::int64_t i = 0; i < count; i += lanes) {
    const auto logit = hn::Load(f32, logits + i);
    const auto capped = hn::Mul(scale, hn::Tanh(f32, hn::Mul(logit, inverse)));
    hn::Store(hn::IfThenElse(hn::IsNaN(logit), logit, capped), f32, logits + i);
  }
}

// NaN if any of them is.
float max_of_vectors(const float* HWY_RESTRICT logits, std::int64_t count) {
  const Tag f32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  auto max = hn::Set(f32, -std::numeric_limits<float>::infinity());
  auto max2 = max;
  // Which operand Max returns if one is NaN depends on the instruction set.
  auto nan = hn::IsNaN(max);  // none
  auto nan2 = nan;
  std::int64_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    const auto logit = hn::Load(f32, logits + i);
    const auto logit2 = hn::Load(f32, logits + i + lanes);
    max = hn::Max(max, logit);
    max2 = hn::Max(max2, logit2);
    nan = hn::Or(nan, hn::IsNaN(logit));
    nan2 = hn::Or(nan2, hn::IsNaN(logit2));
  }
  if (i < count) {
    const auto logit = hn::Load(f32, logits + i);
    max = hn::Max(max, logit);
    nan = hn::Or(nan, hn::IsNaN(logit));
  }
  if (!hn::AllFalse(f32, hn::Or(nan, nan2))) return std::numeric_limits<float>::quiet_NaN();
  return hn::GetLane(hn::MaxOfLanes(f32, hn::Max(max, max2)));
}

// Overwrites logits with exp(logit − max) and returns their sum.
float exp_vectors(float* HWY_RESTRICT logits, std::int64_t count, float max) {
  const Tag f32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  const auto shift = hn::Set(f32, max);
  // Below this the exponential is denormal: slow to multiply, and nothing beside a sum ≥ 1.
  const auto smallest = hn::Set(f32, -87.0F);
  const auto weight_of = [&](std::int64_t i) HWY_ATTR {
    const auto x = hn::Sub(hn::Load(f32, logits + i), shift);
    const auto weight = hn::IfThenElseZero(hn::Ge(x, smallest), hn::Exp(f32, x));
    hn::Store(weight, f32, logits + i);
    return weight;
  };
  auto sum = hn::Zero(f32);
  auto sum2 = sum;
  std::int64_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    sum = hn::Add(sum, weight_of(i));
    sum2 = hn::Add(sum2, weight_of(i + lanes));
  }
  if (i < count) sum = hn::Add(sum, weight_of(i));
  return hn::GetLane(hn::SumOfLanes(f32, hn::Add(sum, sum2)));
}

}  // namespace annulus::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {

HWY_EXPORT(cap_vectors);
HWY_EXPORT(max_of_vectors);
HWY_EXPORT(exp_vectors);

namespace {

constexpr std::int64_t round_up(std::int64_t count) {
  return (count + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

}  // namespace

void cap_row(float* logits, std::int64_t count, float cap) {
  // Whole vectors only; the padding may hold anything, so give it a value.
  std::fill(logits + count, logits + round_up(count), 0.0F);
  HWY_DYNAMIC_DISPATCH(cap_vectors)(logits, round_up(count), cap);
}

float softmax_row(float* logits, std::int64_t count, std::int64_t begin, std::int64_t end,
                  RowSoftmax& row) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (begin >= end) {
    std::fill_n(logits, count, 0.0F);
    return 1.0F;
  }
  // Whole vectors cover [begin, end). What else they cover gets −∞; the rest gets weight 0 at once.
  const std::int64_t first = begin / kRowAlignment * kRowAlignment;
  const std::int64_t last = round_up(end);
  std::fill(logits, logits + first, 0.0F);
  std::fill(logits + first, logits + begin, -kInfinity);
  std::fill(logits + end, logits + last, -kInfinity);
  std::fill(logits + last, logits + std::max(last, count), 0.0F);

  const float tile_max = HWY_DYNAMIC_DISPATCH(max_of_vectors)(logits + first, last - first);
  if (!(tile_max < kInfinity)) {
    // A NaN or an infinite logit: the row has no softmax, and must not look as if it had.
    std::fill(logits + first, logits + last, 0.0F);
    row.sum = std::numeric_limits<double>::quiet_NaN();
    return 1.0F;
  }
  const float max = std::max(row.max, tile_max);
  if (max == -kInfinity) {
    std::fill(logits + first, logits + last, 0.0F);
    return 1.0F;
  }
  const float rescale = row.max == max ? 1.0F : std::exp(row.max - max);
  const float sum = HWY_DYNAMIC_DISPATCH(exp_vectors)(logits + first, last - first, max);
  row.sum = row.sum * rescale + sum;
  row.max = max;
  return rescale;
}

}  // namespace annulus
#endif
