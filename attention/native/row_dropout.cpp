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
using Tag = hn::CappedTag<std::uint32_t, 16>;
using Words = hn::Vec<Tag>;

// Both halves of the products.
HWY_INLINE void multiply(Words x, Words factor, Words& high, Words& low) {
  const Tag u32;
  const hn::RepartitionToWide<Tag> u64;
  const auto even = hn::MulEven(x, factor);
  const auto odd = hn::MulEven(hn::DupOdd(x), factor);
  const auto lower = hn::Set(u64, 0xffffffffU);
  high = hn::BitCast(u32, hn::Or(hn::ShiftRight<32>(even), hn::AndNot(lower, odd)));
  low = hn::BitCast(u32, hn::Or(hn::And(even, lower), hn::ShiftLeft<32>(odd)));
}

// Philox 4x32-10 of neighbouring counters: annulus::philox() in vectors. `first` holds the first
// one.
void draw_bits(PhiloxKey key, const PhiloxCounter& first, std::size_t blocks, DropoutBits& bits) {
  constexpr std::size_t kMost = 4 * kMostDropoutBlocks;
  const Tag u32;
  HWY_ALIGN std::array<std::array<std::uint32_t, kMost>, 4> words;
  for (std::size_t begin = 0; begin < 4 * blocks; begin += hn::Lanes(u32)) {
    auto a = hn::Iota(u32, first[0] + static_cast<std::uint32_t>(begin));
    auto b = hn::Set(u32, first[1]);
    auto c = hn::Set(u32, first[2]);
    auto d = hn::Set(u32, first[3]);
    PhiloxKey round_key = key;
    for (int round = 0; round < 10; ++round) {
      Words high_a, low_a, high_c, low_c;
      multiply(a, hn::Set(u32, 0xD2511F53), high_a, low_a);
      multiply(c, hn::Set(u32, 0xCD9E8D57), high_c, low_c);
      a = hn::Xor(hn::Xor(high_c, b), hn::Set(u32, round_key[0]));
      b = low_c;
      c = hn::Xor(hn::Xor(high_a, d), hn::Set(u32, round_key[1]));
      d = low_a;
      round_key[0] += 0x9E3779B9;
      round_key[1] += 0xBB67AE85;
    }
    hn::StoreU(a, u32, words[0].data() + begin);
    hn::StoreU(b, u32, words[1].data() + begin);
    hn::StoreU(c, u32, words[2].data() + begin);
    hn::StoreU(d, u32, words[3].data() + begin);
  }
  // A word of four counters is eight keys.
  static_assert(std::endian::native == std::endian::little);
  for (std::size_t block = 0; block < blocks; ++block) {
    for (std::size_t word = 0; word < 4; ++word) {
      std::memcpy(bits.data() + kDropoutBlock * block + 8 * word, &words[word][4 * block], 16);
    }
  }
}

void zero_below(const std::uint16_t* HWY_RESTRICT bits, std::uint32_t threshold, std::int64_t count,
                float* HWY_RESTRICT weights) {
  for (std::int64_t i = 0; i < count; ++i) {
    weights[i] = bits[i] < threshold ? 0.0F : weights[i];
  }
}

}  // namespace annulus::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {

HWY_EXPORT(draw_bits);
HWY_EXPORT(zero_below);

void drop_row(const Dropout& dropout, std::int64_t batch, std::int64_t head, GlobalPosition row,
              const PositionRange& columns, float* weights) {
  DropoutBits bits;
  const PhiloxKey key = philox_key(dropout.seed());
  for (std::int64_t done = 0; done < columns.length;) {
    const std::int64_t block = columns.at(done).value() / kDropoutBlock;
    const std::int64_t last = columns.last().value() / kDropoutBlock;
    const auto blocks = std::min<std::int64_t>(last - block + 1, kMostDropoutBlocks);
    HWY_DYNAMIC_DISPATCH(draw_bits)
    (key,
     {static_cast<std::uint32_t>(4 * block), static_cast<std::uint32_t>(row.value()),
      Dropout::third_word(head), Dropout::fourth_word(batch)},
     static_cast<std::size_t>(blocks), bits);
    const std::int64_t end = columns.count_below(GlobalPosition((block + blocks) * kDropoutBlock));
    const std::uint16_t* const first = bits.data() + columns.at(done).value() % kDropoutBlock;
    if (columns.stride == 1) {
      HWY_DYNAMIC_DISPATCH(zero_below)(first, dropout.threshold(), end - done, weights + done);
    } else {
      for (std::int64_t i = done; i < end; ++i) {
        if (first[(i - done) * columns.stride] < dropout.threshold()) weights[i] = 0.0F;
      }
    }
    done = end;
  }
}

}  // namespace annulus
#endif
