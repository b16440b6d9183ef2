#include "native/row_scores.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

// Highway compiles the part below once per instruction set and picks one at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "native/row_scores.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace annulus::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr float kHidden = -std::numeric_limits<float>::infinity();

using Tag = hn::ScalableTag<float>;
using Vector = hn::Vec<Tag>;

// Replaces `count` logits: where hides(i) is true by −∞, else by value(i, logit). Takes whole
// vectors where what these read lies side by side, and the rest one by one.
template <class Hides, class Value, class HidesOne, class ValueOne>
HWY_INLINE SeenLogits replace(std::int64_t count, bool by_vectors, float* HWY_RESTRICT logits,
                              const Hides& hides, const Value& value, const HidesOne& hides_one,
                              const ValueOne& value_one) {
  const Tag f32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  const auto hidden = hn::Set(f32, kHidden);
  auto all_hidden = hn::Eq(hidden, hidden);
  auto largest = hidden;
  std::int64_t i = 0;
  if (by_vectors) {
    for (; i + lanes <= count; i += lanes) {
      const auto hides_these = hides(i);
      all_hidden = hn::And(all_hidden, hides_these);
      const auto left = hn::IfThenElse(hides_these, hidden, value(i, hn::LoadU(f32, logits + i)));
      largest = hn::Max(largest, left);
      hn::StoreU(left, f32, logits + i);
    }
  }
  SeenLogits seen{!hn::AllTrue(f32, all_hidden), hn::GetLane(hn::MaxOfLanes(f32, largest))};
  for (; i < count; ++i) {
    const bool hides_this = hides_one(i);
    seen.any = seen.any || !hides_this;
    logits[i] = hides_this ? kHidden : value_one(i, logits[i]);
    seen.largest = std::max(seen.largest, logits[i]);
  }
  return seen;
}

SeenLogits add_bias(const float* HWY_RESTRICT bias, std::int64_t stride, std::int64_t count,
                    float factor, float* HWY_RESTRICT logits, const float* next) {
  const Tag f32;
  const auto hidden = hn::Set(f32, kHidden);
  const auto scale = hn::Set(f32, factor);
  return replace(
      count, stride == 1, logits,
      [&](std::int64_t i) HWY_ATTR {
        __builtin_prefetch(next + i / 2);
        return hn::Eq(hn::LoadU(f32, bias + i), hidden);
      },
      [&](std::int64_t i, Vector logit)
          HWY_ATTR { return hn::MulAdd(logit, scale, hn::LoadU(f32, bias + i)); },
      [&](std::int64_t i) { return bias[i * stride] == kHidden; },
      [&](std::int64_t i, float logit) { return std::fma(logit, factor, bias[i * stride]); });
}

SeenLogits hide(const std::uint8_t* HWY_RESTRICT mask, std::int64_t stride, std::int64_t count,
                float* HWY_RESTRICT logits) {
  const Tag f32;
  const hn::RebindToUnsigned<Tag> u32;
  const hn::Rebind<std::uint8_t, Tag> u8;
  return replace(
      count, stride == 1, logits,
      [&](std::int64_t i) HWY_ATTR {
        const auto shows = hn::PromoteTo(u32, hn::LoadU(u8, mask + i));
        return hn::RebindMask(f32, hn::Eq(shows, hn::Zero(u32)));
      },
      [](std::int64_t, Vector logit) HWY_ATTR { return logit; },
      [&](std::int64_t i) { return mask[i * stride] == 0; },
      [](std::int64_t, float logit) { return logit; });
}

SeenLogits hide_others(const std::int32_t* HWY_RESTRICT ids, std::int64_t stride,
                       std::int64_t count, std::int32_t wanted, float* HWY_RESTRICT logits) {
  const Tag f32;
  const hn::RebindToSigned<Tag> i32;
  const auto id = hn::Set(i32, wanted);
  return replace(
      count, stride == 1, logits,
      [&](std::int64_t i)
          HWY_ATTR { return hn::RebindMask(f32, hn::Ne(hn::LoadU(i32, ids + i), id)); },
      [](std::int64_t, Vector logit) HWY_ATTR { return logit; },
      [&](std::int64_t i) { return ids[i * stride] != wanted; },
      [](std::int64_t, float logit) { return logit; });
}

// True if any of `count` entries differs from `hides`.
template <class Entry>
HWY_INLINE bool any_other(const Entry* HWY_RESTRICT entries, std::int64_t count, Entry hides) {
  const hn::ScalableTag<Entry> tag;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(tag));
  const auto hidden = hn::Set(tag, hides);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    if (!hn::AllTrue(tag, hn::Eq(hn::LoadU(tag, entries + i), hidden))) return true;
  }
  return std::any_of(entries + i, entries + count, [=](Entry entry) { return entry != hides; });
}

bool any_shown(const std::uint8_t* mask, std::int64_t count) {
  return any_other<std::uint8_t>(mask, count, 0);
}

// Raises `any` to the largest entry of each of `count` columns, and lowers `all` to the smallest.
void gather_rows(const std::uint8_t* HWY_RESTRICT mask, std::int64_t row_stride, std::int64_t rows,
                 std::int64_t count, std::uint8_t* HWY_RESTRICT any,
                 std::uint8_t* HWY_RESTRICT all) {
  const hn::ScalableTag<std::uint8_t> u8;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(u8));
  for (std::int64_t r = 0; r < rows; ++r, mask += row_stride) {
    if (count < lanes) {
      for (std::int64_t i = 0; i < count; ++i) {
        any[i] = std::max(any[i], mask[i]);
        all[i] = std::min(all[i], mask[i]);
      }
      continue;
    }
    for (std::int64_t next = 0; next < count; next += lanes) {
      const std::int64_t i = std::min(next, count - lanes);  // the last two may overlap
      const auto entries = hn::LoadU(u8, mask + i);
      hn::StoreU(hn::Max(hn::LoadU(u8, any + i), entries), u8, any + i);
      hn::StoreU(hn::Min(hn::LoadU(u8, all + i), entries), u8, all + i);
    }
  }
}

bool any_added(const float* bias, std::int64_t count) {
  return any_other(bias, count, kHidden);
}

}  // namespace annulus::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {

HWY_EXPORT(add_bias);
HWY_EXPORT(hide);
HWY_EXPORT(hide_others);
HWY_EXPORT(any_shown);
HWY_EXPORT(gather_rows);
HWY_EXPORT(any_added);

namespace {

// Entries that lie apart, one by one.
template <class Entry>
bool any_other(const Entry* entries, std::int64_t stride, std::int64_t count, Entry hides) {
  if (stride == 0) count = std::min<std::int64_t>(count, 1);
  for (std::int64_t i = 0; i < count; ++i) {
    if (entries[i * stride] != hides) return true;
  }
  return false;
}

}  // namespace

bool shows_any(const float* bias, std::int64_t stride, std::int64_t count) {
  if (stride == 1) return HWY_DYNAMIC_DISPATCH(any_added)(bias, count);
  return any_other(bias, stride, count, -std::numeric_limits<float>::infinity());
}

bool shows_any(const std::uint8_t* mask, std::int64_t stride, std::int64_t count) {
  if (stride == 1) return HWY_DYNAMIC_DISPATCH(any_shown)(mask, count);
  return any_other<std::uint8_t>(mask, stride, count, 0);
}

SeenLogits add_bias_row(const float* bias, std::int64_t stride, std::int64_t count, float factor,
                        float* logits, const float* next) {
  return HWY_DYNAMIC_DISPATCH(add_bias)(bias, stride, count, factor, logits, next);
}

ShownColumns shown_columns(const std::uint8_t* mask, std::int64_t row_stride, std::int64_t rows,
                           std::int64_t count) {
  constexpr std::int64_t kAtOnce = 512;
  ShownColumns shown{count, 0, true};
  for (std::int64_t first = 0; first < count; first += kAtOnce) {
    const std::int64_t columns = std::min(kAtOnce, count - first);
    std::array<std::uint8_t, kAtOnce> any{};
    std::array<std::uint8_t, kAtOnce> all{};
    all.fill(1);
    HWY_DYNAMIC_DISPATCH(gather_rows)
    (mask + first, row_stride, rows, columns, any.data(), all.data());
    shown.all =
        shown.all && std::find(all.begin(), all.begin() + columns, 0) == all.begin() + columns;
    for (std::int64_t i = 0; i < columns; ++i) {
      if (any[static_cast<std::size_t>(i)] == 0) continue;
      shown.begin = std::min(shown.begin, first + i);
      shown.end = first + i + 1;
    }
  }
  return shown;
}

SeenLogits hide_row(const std::uint8_t* mask, std::int64_t stride, std::int64_t count,
                    float* logits) {
  return HWY_DYNAMIC_DISPATCH(hide)(mask, stride, count, logits);
}

SeenLogits hide_other_ids(const std::int32_t* ids, std::int64_t stride, std::int64_t count,
                          std::int32_t wanted, float* logits) {
  return HWY_DYNAMIC_DISPATCH(hide_others)(ids, stride, count, wanted, logits);
}

}  // namespace annulus
#endif
