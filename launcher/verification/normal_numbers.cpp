#include "normal_numbers.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <numbers>

// Highway compiles the part below once per instruction set and picks one at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "normal_numbers.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

// Uses only operations that IEEE 754 rounds, so that numbers are the same on every instruction set:
// no multiply-add (the build keeps the compiler from making one), no library function.

HWY_BEFORE_NAMESPACE();
namespace annulus::verification::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::CappedTag<float, NormalNumbers::kBatch>;
using SignedTag = hn::RebindToSigned<Tag>;
using UnsignedTag = hn::RebindToUnsigned<Tag>;
using Floats = hn::Vec<Tag>;
using Words = hn::Vec<UnsignedTag>;

// √(−2 ln u), u = (word + ½) / 2³². The logarithm follows FreeBSD's e_logf.c.
HWY_INLINE Floats radius(Words word) {
  const Tag f32;
  const SignedTag i32;
  const auto number = [&](float value) HWY_ATTR { return hn::Set(f32, value); };
  // h = u, or 1 − u if u > ½, which keeps its digits even if it is tiny.
  const auto sign = hn::BroadcastSignBit(hn::BitCast(i32, word));
  const auto beyond = hn::RebindMask(f32, hn::Lt(sign, hn::Zero(i32)));
  const auto folded = hn::ConvertTo(f32, hn::Xor(hn::BitCast(i32, word), sign));
  const auto h = hn::Mul(hn::Add(folded, number(0.5F)), number(0x1p-32F));
  const auto u = hn::IfThenElse(beyond, hn::Sub(number(1), h), h);
  // u = 2^exponent · (1 + f), √½ ≤ 1 + f < √2
  const auto root_half = hn::Set(i32, 0x3f3504f3);
  const auto bits = hn::Sub(hn::BitCast(i32, u), root_half);
  const auto exponent = hn::ConvertTo(f32, hn::ShiftRight<23>(bits));
  const auto mantissa = hn::BitCast(f32, hn::Add(hn::And(bits, hn::Set(i32, 0x7fffff)), root_half));
  const auto f =
      hn::IfThenElse(hn::Eq(exponent, hn::Zero(f32)), hn::Neg(h), hn::Sub(mantissa, number(1)));
  // ln(1 + f) = f − f²/2 + s (f²/2 + R(s²)), s = f / (2 + f)
  const auto s = hn::Div(f, hn::Add(number(2), f));
  const auto z = hn::Mul(s, s);
  const auto w = hn::Mul(z, z);
  const auto even =
      hn::Mul(w, hn::Add(number(0xccce13.0p-25F), hn::Mul(w, number(0xf89e26.0p-26F))));
  const auto odd =
      hn::Mul(z, hn::Add(number(0xaaaaaa.0p-24F), hn::Mul(w, number(0x91e9ee.0p-25F))));
  const auto half_square = hn::Mul(number(0.5F), hn::Mul(f, f));
  const auto tail = hn::Add(hn::Mul(s, hn::Add(half_square, hn::Add(even, odd))),
                            hn::Mul(exponent, number(9.0580006145e-06F)));
  const auto log =
      hn::Add(hn::Sub(f, hn::Sub(half_square, tail)), hn::Mul(exponent, number(6.9313812256e-01F)));
  return hn::Sqrt(hn::Mul(number(-2), log));
}

// Cosine and sine of 2π word / 2³². The polynomials are from Cephes' sinf.c.
HWY_INLINE void turn(Words word, Floats& cosine, Floats& sine) {
  const Tag f32;
  const SignedTag i32;
  const UnsignedTag u32;
  const auto number = [&](float value) HWY_ATTR { return hn::Set(f32, value); };
  // Quarter turns, and up to half of one more either way.
  const auto quarters = hn::ShiftRight<30>(hn::Add(word, hn::Set(u32, 1U << 29U)));
  const auto rest = hn::BitCast(i32, hn::Sub(word, hn::ShiftLeft<30>(quarters)));
  const auto x =
      hn::Mul(hn::ConvertTo(f32, rest), number(static_cast<float>(std::numbers::pi * 0x1p-31)));
  const auto z = hn::Mul(x, x);
  auto p = hn::Sub(number(8.3321608736e-3F), hn::Mul(z, number(1.9515295891e-4F)));
  p = hn::Sub(hn::Mul(p, z), number(1.6666654611e-1F));
  const auto sine_of_rest = hn::Add(x, hn::Mul(x, hn::Mul(z, p)));
  p = hn::Sub(hn::Mul(z, number(2.443315711809948e-5F)), number(1.388731625493765e-3F));
  p = hn::Add(hn::Mul(p, z), number(4.166664568298827e-2F));
  const auto cosine_of_rest =
      hn::Add(hn::Sub(number(1), hn::Mul(number(0.5F), z)), hn::Mul(hn::Mul(z, z), p));
  // A quarter turn makes (c, s) into (−s, c), half a turn into (−c, −s).
  const auto one = hn::Set(u32, 1);
  const auto swapped = hn::RebindMask(f32, hn::Eq(hn::And(quarters, one), one));
  const auto sign = [&](Words half_turns) HWY_ATTR {
    return hn::BitCast(f32, hn::ShiftLeft<31>(hn::ShiftRight<1>(half_turns)));
  };
  cosine =
      hn::Xor(hn::IfThenElse(swapped, sine_of_rest, cosine_of_rest), sign(hn::Add(quarters, one)));
  sine = hn::Xor(hn::IfThenElse(swapped, cosine_of_rest, sine_of_rest), sign(quarters));
}

HWY_INLINE void normal_pair(Words length, Words direction, Floats& x, Floats& y) {
  Floats cosine, sine;
  turn(direction, cosine, sine);
  const auto r = radius(length);
  x = hn::Mul(r, cosine);
  y = hn::Mul(r, sine);
}

// The numbers of `count` ≤ kBatch counters from `first` on; `numbers` has room for a whole batch.
void batch_of_numbers(PhiloxKey key, std::uint32_t operand, std::uint64_t first, std::size_t count,
                      float* HWY_RESTRICT numbers) {
  constexpr std::size_t kBatch = NormalNumbers::kBatch;
  std::array<std::array<std::uint32_t, kBatch>, 4> words{};
  for (std::size_t i = 0; i < kBatch; ++i) {
    const std::uint64_t counter = first + i;
    const PhiloxCounter random =
        philox({static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32U),
                operand, NormalNumbers::kTensorStream},
               key);
    for (std::size_t word = 0; word < 4; ++word) words[word][i] = random[word];
  }
  const Tag f32;
  const UnsignedTag u32;
  for (std::size_t i = 0; i < count; i += hn::Lanes(f32)) {
    const auto word = [&](std::size_t which)
                          HWY_ATTR { return hn::LoadU(u32, words[which].data() + i); };
    Floats x0, y0, x1, y1;
    normal_pair(word(0), word(1), x0, y0);
    normal_pair(word(2), word(3), x1, y1);
    hn::StoreInterleaved4(x0, y0, x1, y1, f32, numbers + 4 * i);
  }
}

}  // namespace annulus::verification::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus::verification {

HWY_EXPORT(batch_of_numbers);

const float* NormalNumbers::run(std::uint64_t first, std::int64_t count) {
  const std::uint64_t begin = first / 4;
  const std::uint64_t end = (first + static_cast<std::uint64_t>(count) + 3) / 4;
  const auto counters = static_cast<std::size_t>(end - begin);
  numbers_.resize(std::max(numbers_.size(), (counters + kBatch) * 4));
  for (std::size_t done = 0; done < counters; done += kBatch) {
    HWY_DYNAMIC_DISPATCH(batch_of_numbers)
    (key_, static_cast<std::uint32_t>(operand_), begin + done, std::min(kBatch, counters - done),
     numbers_.data() + 4 * done);
  }
  return numbers_.data() + first % 4;
}

}  // namespace annulus::verification
#endif
