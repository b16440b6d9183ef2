// Per instruction set: included by files that Highway compiles once for each of them.
#if defined(ANNULUS_NATIVE_VECTOR_MATH_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_NATIVE_VECTOR_MATH_INL_HPP
#undef ANNULUS_NATIVE_VECTOR_MATH_INL_HPP
#else
#define ANNULUS_NATIVE_VECTOR_MATH_INL_HPP
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace annulus::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::CappedTag<float, 16>;
using Bits = hn::RebindToUnsigned<Tag>;
using Vector = hn::Vec<Tag>;

// tanh(x): an odd rational function of x, clamped to where tanh rounds to ±1. Its relative error is
// 4e-7 if `exact`, with the coefficients of Eigen's float32 tanh; otherwise 2e-5, below the
// rounding of a bfloat16 weight.
template <bool exact>
HWY_INLINE Vector tanh_of(Tag f32, Vector x) {
  const auto constant = [f32](float value) HWY_ATTR { return hn::Set(f32, value); };
  const float most = exact ? 7.90531110763549805F : 6.25F;
  x = hn::Max(hn::Min(x, constant(most)), constant(-most));
  const auto square = hn::Mul(x, x);
  if constexpr (exact) {
    auto p = constant(-2.76076847742355e-16F);
    p = hn::MulAdd(p, square, constant(2.00018790482477e-13F));
    p = hn::MulAdd(p, square, constant(-8.60467152213735e-11F));
    p = hn::MulAdd(p, square, constant(5.12229709037114e-08F));
    p = hn::MulAdd(p, square, constant(1.48572235717979e-05F));
    p = hn::MulAdd(p, square, constant(6.37261928875436e-04F));
    p = hn::MulAdd(p, square, constant(4.89352455891786e-03F));
    auto q = constant(1.19825839466702e-06F);
    q = hn::MulAdd(q, square, constant(1.18534705686654e-04F));
    q = hn::MulAdd(q, square, constant(2.26843463243900e-03F));
    q = hn::MulAdd(q, square, constant(4.89352518554385e-03F));
    return hn::Div(hn::Mul(x, p), q);
  } else {
    auto p = constant(1.483975694e-03F);
    p = hn::MulAdd(p, square, constant(1.143548058e-01F));
    p = hn::MulAdd(p, square, constant(9.999904608e-01F));
    auto q = constant(5.433654721e-05F);
    q = hn::MulAdd(q, square, constant(1.743104159e-02F));
    q = hn::MulAdd(q, square, constant(4.476247443e-01F));
    q = hn::MulAdd(q, square, constant(1.0F));
    // A division takes longer than all of the above, so a Newton step instead.
    const auto inverse = hn::ApproximateReciprocal(q);
    const auto quotient = hn::Mul(hn::Mul(x, p), inverse);
    return hn::MulAdd(quotient, hn::NegMulAdd(q, inverse, constant(1.0F)), quotient);
  }
}

// exp(x) for x ≤ 0; NaN for NaN. Denormal results become 0: they are slow to multiply, and
// negligible in a sum ≥ 1. With x = n · ln 2 + r and |r| ≤ ln 2 / 2, exp(x) is 2ⁿ times the minimax
// polynomial in r. Its relative error is 3e-9 if `exact`, otherwise 5e-6, well below the rounding
// to half precision.
template <bool exact>
HWY_INLINE Vector exp_of(Tag f32, Vector x) {
  const Bits u32;
  const auto constant = [f32](float value) HWY_ATTR { return hn::Set(f32, value); };
  // Adding 1.5 · 2²³ rounds to an integer, which is left in the lowest bits. The 127 makes it the
  // biased exponent of 2ⁿ.
  const auto magic = constant(12582912.0F + 127.0F);
  const auto shifted = hn::MulAdd(x, constant(1.44269504F), magic);
  const auto n = hn::Sub(shifted, magic);
  // ln 2 is split in two, so that n times the first part is exact.
  const auto r =
      hn::NegMulAdd(n, constant(-2.12194440e-4F), hn::NegMulAdd(n, constant(0.693359375F), x));
  auto p = exact ? constant(1.38146128e-3F) : constant(4.12777476e-2F);
  if constexpr (exact) {
    p = hn::MulAdd(p, r, constant(8.36871006e-3F));
    p = hn::MulAdd(p, r, constant(4.16683890e-2F));
    p = hn::MulAdd(p, r, constant(1.66665211e-1F));
    p = hn::MulAdd(p, r, constant(4.99999940e-1F));
  } else {
    p = hn::MulAdd(p, r, constant(1.67535141e-1F));
    p = hn::MulAdd(p, r, constant(5.00051141e-1F));
  }
  p = hn::MulAdd(p, r, constant(1.0F));
  p = hn::MulAdd(p, r, constant(1.0F));
  const auto power = hn::BitCast(f32, hn::ShiftLeft<23>(hn::BitCast(u32, shifted)));
  return hn::IfThenZeroElse(hn::Lt(x, constant(-87.0F)), hn::Mul(p, power));
}

}  // namespace annulus::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
