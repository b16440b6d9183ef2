#include "native/row_gradients.hpp"

#include <algorithm>

#include "native/row_softmax.hpp"

// Highway compiles the part below once per instruction set and picks one at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "native/row_gradients.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "native/vector_math-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace annulus::HWY_NAMESPACE {

// 1/cosh²(x) = 4e / (1 + e)² with e = exp(−2|x|).
void slope_vectors(const float* HWY_RESTRICT logits, std::int64_t count, float scale, float cap,
                   float* HWY_RESTRICT slopes) {
  const Tag f32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  const auto one = hn::Set(f32, 1.0F);
  const auto factor = hn::Set(f32, -2 / cap);
  const auto four = hn::Set(f32, 4 * scale);
  for (std::int64_t i = 0; i < count; i += lanes) {
    const auto logit = hn::Abs(hn::Load(f32, logits + i));
    const auto e = exp_of<true>(f32, hn::Mul(logit, factor));
    const auto sum = hn::Add(one, e);
    hn::Store(hn::Div(hn::Mul(four, e), hn::Mul(sum, sum)), f32, slopes + i);
  }
}

template <bool slopes, bool keeps>
HWY_INLINE void gradient_vectors(const RowGradient& row, std::int64_t count,
                                 float* HWY_RESTRICT logits, float* HWY_RESTRICT grads,
                                 float* HWY_RESTRICT grad_logits) {
  const Tag f32;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  const auto lse = hn::Set(f32, row.lse);
  const auto delta = hn::Set(f32, row.delta);
  const auto scale = hn::Set(f32, row.scale);
  const auto zero = hn::Zero(f32);
  const auto may_hide = hn::Eq(zero, hn::Set(f32, row.hides ? 0.0F : 1.0F));
  for (std::int64_t i = 0; i < count; i += lanes) {
    const auto probability = exp_of<true>(f32, hn::Sub(hn::Load(f32, logits + i), lse));
    const auto hidden = hn::And(may_hide, hn::Eq(probability, zero));
    auto weight = probability;
    auto grad = hn::Load(f32, grads + i);
    if constexpr (keeps) {
      const auto keep = hn::Load(f32, row.keep + i);
      weight = hn::Mul(weight, keep);
      grad = hn::Mul(grad, keep);
    }
    const auto grad_logit = hn::IfThenZeroElse(hidden, hn::Mul(probability, hn::Sub(grad, delta)));
    auto slope = scale;
    if constexpr (slopes) slope = hn::Load(f32, row.slopes + i);
    // A slope may be NaN where a hidden logit was.
    hn::Store(hn::IfThenZeroElse(hidden, hn::Mul(grad_logit, slope)), f32, grads + i);
    hn::Store(weight, f32, logits + i);
    if (grad_logits != nullptr) hn::Store(grad_logit, f32, grad_logits + i);
  }
}

void gradient_vectors_of(const RowGradient& row, std::int64_t count, float* logits, float* grads,
                         float* grad_logits) {
  if (row.slopes != nullptr) {
    row.keep != nullptr ? gradient_vectors<true, true>(row, count, logits, grads, grad_logits)
                        : gradient_vectors<true, false>(row, count, logits, grads, grad_logits);
  } else {
    row.keep != nullptr ? gradient_vectors<false, true>(row, count, logits, grads, grad_logits)
                        : gradient_vectors<false, false>(row, count, logits, grads, grad_logits);
  }
}

}  // namespace annulus::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {

HWY_EXPORT(slope_vectors);
HWY_EXPORT(gradient_vectors_of);

void slopes_of_cap(const float* logits, std::int64_t count, float scale, float cap, float* slopes) {
  HWY_DYNAMIC_DISPATCH(slope_vectors)
  (logits, round_up_to_row_alignment(count), scale, std::clamp(cap, 1e-30F, 1e30F), slopes);
}

void gradient_row(const RowGradient& row, std::int64_t count, float* logits, float* grads,
                  float* grad_logits) {
  HWY_DYNAMIC_DISPATCH(gradient_vectors_of)
  (row, round_up_to_row_alignment(count), logits, grads, grad_logits);
}

}  // namespace annulus
#endif
