#include "native/row_softmax.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

// Highway compiles the part below once per instruction set and picks one at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "native/row_softmax.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "native/vector_math-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace annulus::HWY_NAMESPACE {

template <bool exact>
HWY_INLINE float cap_vectors(float* HWY_RESTRICT logits, std::int64_t count, float scale,
                             float cap) {
  const Tag f32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  const auto factor = hn::Set(f32, scale / cap);
  const auto bound = hn::Set(f32, cap);
  auto max = hn::Set(f32, -cap);
  for (std::int64_t i = 0; i < count; i += lanes) {
    const auto logit = hn::Load(f32, logits + i);
    auto capped = hn::Mul(bound, tanh_of<exact>(f32, hn::Mul(logit, factor)));
    capped = hn::IfThenElse(hn::IsNaN(logit), logit, capped);
    max = hn::Max(max, capped);
    hn::Store(capped, f32, logits + i);
  }
  return hn::GetLane(hn::MaxOfLanes(f32, max));
}

float cap_exactly(float* logits, std::int64_t count, float scale, float cap) {
  return cap_vectors<true>(logits, count, scale, cap);
}
float cap_roughly(float* logits, std::int64_t count, float scale, float cap) {
  return cap_vectors<false>(logits, count, scale, cap);
}

void scale_vectors(const float* from, std::int64_t count, float factor, float* to) {
  const Tag f32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  const auto by = hn::Set(f32, factor);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(f32, from + i), by), f32, to + i);
  }
  for (; i < count; ++i) to[i] = from[i] * factor;
}

// The propagation of a NaN depends on the instruction set.
float max_of_vectors(const float* HWY_RESTRICT logits, std::int64_t count, const float* next) {
  const Tag f32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  auto max = hn::Set(f32, -std::numeric_limits<float>::infinity());
  auto max2 = max;
  for (std::int64_t i = 0; i < count; i += 2 * lanes) {
    __builtin_prefetch(next + i / 2);
    max = hn::Max(max, hn::Load(f32, logits + i));
    max2 = hn::Max(max2, hn::Load(f32, logits + i + lanes));
  }
  return hn::GetLane(hn::MaxOfLanes(f32, hn::Max(max, max2)));
}

// Stores the upper halves of the float32 values in a and b.
HWY_INLINE void store_upper_halves(hn::Vec<Bits> a, hn::Vec<Bits> b, std::uint16_t* to) {
#if HWY_TARGET == HWY_SCALAR
  to[0] = static_cast<std::uint16_t>(hn::GetLane(a) >> 16U);
  to[1] = static_cast<std::uint16_t>(hn::GetLane(b) >> 16U);
#else
  const hn::Repartition<std::uint16_t, Tag> u16;
  hn::StoreU(hn::ConcatOdd(u16, hn::BitCast(u16, b), hn::BitCast(u16, a)), u16, to);
#endif
}

// The remainder of a weight after its first parts: see WeightRow.
class Remainder {
 public:
  HWY_INLINE explicit Remainder(Vector weight) : rest_(weight) {}
  // The next part, in the upper halves.
  HWY_INLINE hn::Vec<Bits> take() {
    const Tag f32;
    const Bits u32;
    // Adding half of the lowest bit that is kept rounds to nearest.
    const auto part = hn::Add(hn::BitCast(u32, rest_), hn::Set(u32, 0x8000));
    rest_ = hn::Sub(rest_, hn::BitCast(f32, hn::And(part, hn::Set(u32, 0xffff0000))));
    return part;
  }

 private:
  Vector rest_;
};

// Writes the weights exp(scale · logit − max), as floats if `parts` is 0, and returns their sum.
template <int parts>
HWY_INLINE float weigh_vectors(const float* logits, std::int64_t count, float scale, float max,
                               const WeightRow& weights, const float* next) {
  const Tag f32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  const auto factor = hn::Set(f32, scale);
  const auto shift = hn::Set(f32, max);
  constexpr bool kExact = parts == 0 || parts == 3;
  const auto weight_of = [&](std::int64_t i) HWY_ATTR {
    return exp_of<kExact>(f32, hn::Sub(hn::Mul(hn::Load(f32, logits + i), factor), shift));
  };
  auto sum = hn::Zero(f32);
  auto sum2 = sum;
  for (std::int64_t i = 0; i < count; i += 2 * lanes) {
    __builtin_prefetch(next + i / 2);
    const auto weight = weight_of(i);
    const auto weight2 = weight_of(i + lanes);
    sum = hn::Add(sum, weight);
    sum2 = hn::Add(sum2, weight2);
    if constexpr (parts == 0) {
      hn::Store(weight, f32, weights.floats + i);
      hn::Store(weight2, f32, weights.floats + i + lanes);
    } else {
      Remainder rest(weight);
      Remainder rest2(weight2);
      for (std::size_t part = 0; part < parts; ++part) {
        const auto taken = rest.take();
        store_upper_halves(taken, rest2.take(), weights.parts[part] + i);
      }
    }
  }
  return hn::GetLane(hn::SumOfLanes(f32, hn::Add(sum, sum2)));
}

float weigh_row(const float* logits, std::int64_t count, float scale, float max,
                const WeightRow& weights, const float* next) {
  if (weights.floats != nullptr) return weigh_vectors<0>(logits, count, scale, max, weights, next);
  if (weights.parts[2] != nullptr)
    return weigh_vectors<3>(logits, count, scale, max, weights, next);
  return weights.parts[1] != nullptr ? weigh_vectors<2>(logits, count, scale, max, weights, next)
                                     : weigh_vectors<1>(logits, count, scale, max, weights, next);
}

}  // namespace annulus::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {

HWY_EXPORT(cap_exactly);
HWY_EXPORT(cap_roughly);
HWY_EXPORT(scale_vectors);
HWY_EXPORT(max_of_vectors);
HWY_EXPORT(weigh_row);

namespace {

void clear(const WeightRow& weights, std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  const auto fill = [begin, end](auto* row) {
    if (row != nullptr) std::fill(row + begin, row + end, 0);
  };
  fill(weights.floats);
  for (std::uint16_t* const part : weights.parts) fill(part);
}

bool any_nan(const float* logits, std::int64_t count) {
  return std::any_of(logits, logits + count, [](float logit) { return std::isnan(logit); });
}

}  // namespace

WeightRow WeightRow::from(std::int64_t column) const {
  const auto advanced = [column](auto* row) { return row == nullptr ? row : row + column; };
  return {advanced(floats), {advanced(parts[0]), advanced(parts[1]), advanced(parts[2])}};
}

float cap_row(float* logits, std::int64_t count, float scale, float cap, bool exact) {
  // Beyond these bounds, scale / cap may leave the range of float32. The bounds do not change
  // logits.
  cap = std::clamp(cap, 1e-30F, 1e30F);
  constexpr float kRoughCap = 50;  // the error is part of the capped logit
  exact = exact || cap > kRoughCap;
  // Whole vectors only; the padding may hold anything, so give it a value that is not the largest.
  const std::int64_t padded = round_up_to_row_alignment(count);
  std::fill(logits + count, logits + padded, -std::numeric_limits<float>::infinity());
  return exact ? HWY_DYNAMIC_DISPATCH(cap_exactly)(logits, padded, scale, cap)
               : HWY_DYNAMIC_DISPATCH(cap_roughly)(logits, padded, scale, cap);
}

void scale_row(const float* from, std::int64_t count, float factor, float* to) {
  HWY_DYNAMIC_DISPATCH(scale_vectors)(from, count, factor, to);
}

float softmax_row(float* logits, std::int64_t count, std::int64_t begin, std::int64_t end,
                  float scale, const WeightRow& weights, RowSoftmax& row, const float* next,
                  std::optional<float> largest) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::int64_t padded = round_up_to_row_alignment(count);
  if (begin >= end) {
    clear(weights, 0, padded);
    return 1.0F;
  }
  // Whole vectors cover [begin, end). What else they cover gets −∞; the rest gets weight 0 at once.
  const std::int64_t first = begin / kRowAlignment * kRowAlignment;
  const std::int64_t last = round_up_to_row_alignment(end);
  std::fill(logits + first, logits + begin, -kInfinity);
  std::fill(logits + end, logits + last, -kInfinity);
  clear(weights, 0, first);
  clear(weights, last, padded);

  if (!largest) largest = HWY_DYNAMIC_DISPATCH(max_of_vectors)(logits + first, last - first, next);
  const float tile_max = *largest * scale;
  const float max = std::max(row.max, tile_max);
  const auto lose = [&] {
    // A NaN or an infinite logit: the row has no softmax, and must not look as if it had.
    clear(weights, first, last);
    row.sum = std::numeric_limits<double>::quiet_NaN();
    return 1.0F;
  };
  if (!(tile_max < kInfinity)) return lose();
  if (max == -kInfinity) {
    if (any_nan(logits + first, last - first)) return lose();
    clear(weights, first, last);
    return 1.0F;
  }
  const float sum = HWY_DYNAMIC_DISPATCH(weigh_row)(logits + first, last - first, scale, max,
                                                    weights.from(first), next + (last - first) / 2);
  if (std::isnan(sum)) return lose();
  const float rescale = row.max == max ? 1.0F : std::exp(row.max - max);
  row.sum = row.sum * rescale + sum;
  row.max = max;
  return rescale;
}

}  // namespace annulus
#endif
