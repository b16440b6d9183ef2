#include "native/row_dropout.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include <annulus/attention/philox.hpp>

// Highway compiles the part below once per instruction set and picks one at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "native/row_dropout.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace annulus::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR

void draw_bits(PhiloxKey key, const PhiloxCounter& first, std::size_t blocks, DropoutBits& bits) {
  for (std::size_t key_index = 0; key_index < blocks * kDropoutBlock; ++key_index) {
    PhiloxCounter counter = first;
    counter[0] += static_cast<std::uint32_t>(key_index / 32 * 4 + key_index % 8 / 2);
    const std::uint32_t word = philox(counter, key)[key_index % 32 / 8];
    bits[key_index] = static_cast<std::uint16_t>(word >> (key_index % 2 * 16));
  }
}

#else

// annulus::philox() for 4 · `blocks` consecutive counters from `first` on. A vector holds the same
// word of neighbouring counters, in the lower halves of its lanes; the upper halves are unused. Two
// such vectors take turns, since each step of one waits for the step before it.
void draw_bits(PhiloxKey key, const PhiloxCounter& first, std::size_t blocks, DropoutBits& bits) {
  const hn::CappedTag<std::uint64_t, 8> u64;
  const hn::RepartitionToNarrow<decltype(u64)> u32;
  const std::size_t lanes = hn::Lanes(u64);
  const auto word = [&](std::uint32_t value) HWY_ATTR { return hn::Set(u32, value); };
  const auto product = [&](std::uint32_t factor, auto x)
                           HWY_ATTR { return hn::BitCast(u32, hn::MulEven(word(factor), x)); };
  const auto upper = [&](auto x) HWY_ATTR { return hn::Shuffle2301(x); };
  const auto round = [&](const PhiloxKey& round_key, auto& a, auto& b, auto& c, auto& d) HWY_ATTR {
    const auto even = product(0xD2511F53, a);
    const auto odd = product(0xCD9E8D57, c);
    a = hn::Xor3(upper(odd), b, word(round_key[0]));
    b = odd;
    c = hn::Xor3(upper(even), d, word(round_key[1]));
    d = even;
  };
  std::array<PhiloxKey, 10> round_keys;
  for (PhiloxKey& round_key : round_keys) {
    round_key = key;
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  const auto second = word(first[1]);
  const auto third = word(first[2]);
  const auto fourth = word(first[3]);
  std::uint64_t counter = first[0];
  // Four counters hold the bits of a block of 32 keys.
  for (std::size_t begin = 0; begin < 4 * blocks; begin += 2 * lanes, counter += 2 * lanes) {
    std::uint16_t* to = bits.data() + kDropoutBlock / 4 * begin;
    auto a = hn::BitCast(u32, hn::Iota(u64, counter));
    auto b = second;
    auto c = third;
    auto d = fourth;
    auto a2 = hn::BitCast(u32, hn::Iota(u64, counter + lanes));
    auto b2 = second;
    auto c2 = third;
    auto d2 = fourth;
#pragma GCC unroll 10
    for (const PhiloxKey& round_key : round_keys) {
      round(round_key, a, b, c, d);
      round(round_key, a2, b2, c2, d2);
    }
    // The same word of four consecutive counters holds the bits of eight keys.
    static_assert(std::endian::native == std::endian::little);
    if (lanes == 8) {
      const auto keep = [&](auto w, auto x, auto y, auto z) HWY_ATTR {
        const hn::Repartition<std::uint16_t, decltype(u64)> u16;
        const auto even = hn::ConcatEven(u32, y, w);
        const auto odd = hn::ConcatEven(u32, z, x);
        hn::StoreU(hn::BitCast(u16, hn::OddEvenBlocks(hn::SwapAdjacentBlocks(odd), even)), u16, to);
        hn::StoreU(hn::BitCast(u16, hn::OddEvenBlocks(odd, hn::SwapAdjacentBlocks(even))), u16,
                   to + kDropoutBlock);
        to += 2 * kDropoutBlock;
      };
      keep(a, b, c, d);
      keep(a2, b2, c2, d2);
      continue;
    }
    alignas(64) std::uint32_t words[4][16];  // NOLINT(modernize-avoid-c-arrays): plain numbers
    const auto keep = [&](std::size_t which, auto x, auto x2) HWY_ATTR {
      const hn::Rebind<std::uint32_t, decltype(u64)> half;
      hn::StoreU(hn::TruncateTo(half, hn::BitCast(u64, x)), half, words[which]);
      hn::StoreU(hn::TruncateTo(half, hn::BitCast(u64, x2)), half, words[which] + lanes);
    };
    keep(0, a, a2);
    keep(1, b, b2);
    keep(2, c, c2);
    keep(3, d, d2);
    for (std::size_t four = 0; four < 2 * lanes; four += 4) {
      for (const auto& of_counters : words) {
        std::memcpy(to, of_counters + four, 16);
        to += 8;
      }
    }
  }
}

#endif

void zero_floats_below(const std::uint16_t* HWY_RESTRICT bits, std::uint32_t threshold,
                       std::int64_t count, float* HWY_RESTRICT weights) {
  const hn::ScalableTag<float> f32;
  const hn::RebindToUnsigned<decltype(f32)> u32;
  const hn::Rebind<std::uint16_t, decltype(f32)> u16;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(f32));
  const auto bound = hn::Set(u32, threshold);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto drawn = hn::PromoteTo(u32, hn::LoadU(u16, bits + i));
    const auto drops = hn::RebindMask(f32, hn::Lt(drawn, bound));
    hn::StoreU(hn::IfThenZeroElse(drops, hn::LoadU(f32, weights + i)), f32, weights + i);
  }
  for (; i < count; ++i) {
    if (bits[i] < threshold) weights[i] = 0.0F;
  }
}

void zero_halves_below(const std::uint16_t* HWY_RESTRICT bits, std::uint32_t threshold,
                       std::int64_t count, std::uint16_t* HWY_RESTRICT weights) {
  const hn::ScalableTag<std::uint16_t> u16;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(u16));
  const auto bound = hn::Set(u16, static_cast<std::uint16_t>(threshold));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto drops = hn::Lt(hn::LoadU(u16, bits + i), bound);
    hn::StoreU(hn::IfThenZeroElse(drops, hn::LoadU(u16, weights + i)), u16, weights + i);
  }
  for (; i < count; ++i) {
    if (bits[i] < threshold) weights[i] = 0;
  }
}

}  // namespace annulus::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {

HWY_EXPORT(draw_bits);
HWY_EXPORT(zero_floats_below);
HWY_EXPORT(zero_halves_below);

namespace {

void zero_below(const std::uint16_t* bits, std::uint32_t threshold, std::int64_t count,
                const WeightRow& weights) {
  if (weights.floats != nullptr) {
    HWY_DYNAMIC_DISPATCH(zero_floats_below)(bits, threshold, count, weights.floats);
  } else {
    for (std::uint16_t* const part : weights.parts) {
      if (part != nullptr) HWY_DYNAMIC_DISPATCH(zero_halves_below)(bits, threshold, count, part);
    }
  }
}

}  // namespace

void drop_row(const Dropout& dropout, std::int64_t batch, std::int64_t head, GlobalPosition row,
              const PositionRange& columns, const WeightRow& weights) {
  DropoutBits bits;
  const PhiloxKey key = philox_key(dropout.seed());
  for (std::int64_t done = 0; done < columns.length;) {
    const std::int64_t block = columns.at(done).value() / kDropoutBlock;
    const std::int64_t last = columns.last().value() / kDropoutBlock;
    const auto blocks = std::min<std::int64_t>(last - block + 1, kMaximumDropoutBlocks);
    HWY_DYNAMIC_DISPATCH(draw_bits)
    (key,
     {static_cast<std::uint32_t>(4 * block), static_cast<std::uint32_t>(row.value()),
      Dropout::third_word(head), Dropout::fourth_word(batch)},
     static_cast<std::size_t>(blocks), bits);
    const std::int64_t end = columns.count_below(GlobalPosition((block + blocks) * kDropoutBlock));
    const std::uint16_t* const first = bits.data() + columns.at(done).value() % kDropoutBlock;
    const WeightRow next = weights.from(done);
    if (columns.stride == 1) {
      zero_below(first, dropout.threshold(), end - done, next);
    } else {
      for (std::int64_t i = 0; i < end - done; ++i) {
        zero_below(first + i * columns.stride, dropout.threshold(), 1, next.from(i));
      }
    }
    done = end;
  }
}

}  // namespace annulus
#endif
