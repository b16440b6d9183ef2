#include "native/row_scores.hpp"

#include <algorithm>
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

bool add_bias(const float* HWY_RESTRICT bias, std::int64_t stride, std::int64_t count, float factor,
              float* HWY_RESTRICT logits) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  const hn::ScalableTag<float> f32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  const auto hidden = hn::Set(f32, kHidden);
  auto all_hidden = hn::Eq(hidden, hidden);
  std::int64_t i = 0;
  if (stride == 1) {
    for (; i + lanes <= count; i += lanes) {
      const auto added = hn::LoadU(f32, bias + i);
      const auto hides = hn::Eq(added, hidden);
      all_hidden = hn::And(all_hidden, hides);
      const auto sum = hn::MulAdd(hn::LoadU(f32, logits + i), hn::Set(f32, factor), added);
      hn::StoreU(hn::IfThenElse(hides, hidden, sum), f32, logits + i);
    }
  }
  bool any = !hn::AllTrue(f32, all_hidden);
  for (; i < count; ++i) {
    const float added = bias[i * stride];
    any = any || added != kHidden;
    logits[i] = added == kHidden ? kHidden : std::fma(logits[i], factor, added);
  }
  return any;
}

bool hide(const std::uint8_t* HWY_RESTRICT mask, std::int64_t stride, std::int64_t count,
          float* HWY_RESTRICT logits) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  const hn::ScalableTag<float> f32;
  const hn::RebindToUnsigned<decltype(f32)> u32;
  const hn::Rebind<std::uint8_t, decltype(f32)> u8;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  const auto hidden = hn::Set(f32, kHidden);
  auto seen = hn::Zero(u32);
  std::int64_t i = 0;
  if (stride == 1) {
    for (; i + lanes <= count; i += lanes) {
      const auto shows = hn::PromoteTo(u32, hn::LoadU(u8, mask + i));
      seen = hn::Or(seen, shows);
      const auto hides = hn::RebindMask(f32, hn::Eq(shows, hn::Zero(u32)));
      hn::StoreU(hn::IfThenElse(hides, hidden, hn::LoadU(f32, logits + i)), f32, logits + i);
    }
  }
  bool any = !hn::AllTrue(u32, hn::Eq(seen, hn::Zero(u32)));
  for (; i < count; ++i) {
    any = any || mask[i * stride] != 0;
    if (mask[i * stride] == 0) logits[i] = kHidden;
  }
  return any;
}

}  // namespace annulus::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {

HWY_EXPORT(add_bias);
HWY_EXPORT(hide);

namespace {

// Most rows have a visible entry near the beginning, so entries are tested in small batches.
template <class Entry, class Shows>
bool any_of_row(const Entry* entries, std::int64_t stride, std::int64_t count, const Shows& shows) {
  constexpr std::int64_t kAtOnce = 64;
  if (stride == 0) count = std::min<std::int64_t>(count, 1);
  for (std::int64_t begin = 0; begin < count; begin += kAtOnce) {
    const std::int64_t end = std::min(begin + kAtOnce, count);
    bool any = false;
    for (std::int64_t i = begin; i < end; ++i) any |= shows(entries[i * stride]);
    if (any) return true;
  }
  return false;
}

}  // namespace

bool shows_any(const float* bias, std::int64_t stride, std::int64_t count) {
  return any_of_row(bias, stride, count,
                    [](float entry) { return entry != -std::numeric_limits<float>::infinity(); });
}

bool shows_any(const std::uint8_t* mask, std::int64_t stride, std::int64_t count) {
  return any_of_row(mask, stride, count, [](std::uint8_t entry) { return entry != 0; });
}

bool add_bias_row(const float* bias, std::int64_t stride, std::int64_t count, float factor,
                  float* logits) {
  return HWY_DYNAMIC_DISPATCH(add_bias)(bias, stride, count, factor, logits);
}

bool hide_row(const std::uint8_t* mask, std::int64_t stride, std::int64_t count, float* logits) {
  return HWY_DYNAMIC_DISPATCH(hide)(mask, stride, count, logits);
}

}  // namespace annulus
#endif
