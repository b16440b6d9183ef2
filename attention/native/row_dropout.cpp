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

// Counters side by side: the loops over them become vectors.
constexpr std::size_t kLanes = 16;
using Lanes = std::uint32_t[kLanes];  // NOLINT(modernize-avoid-c-arrays): an array of plain numbers

// annulus::philox() of neighbouring counters. `first` holds the first one.
void draw_bits(PhiloxKey key, const PhiloxCounter& first, std::size_t blocks, DropoutBits& bits) {
  constexpr std::size_t kBlocks = kLanes / 4;
  for (std::size_t begin = 0; begin < blocks; begin += kBlocks) {
    Lanes a, b, c, d;
    for (std::size_t i = 0; i < kLanes; ++i) {
      a[i] = first[0] + static_cast<std::uint32_t>(4 * begin + i);
      b[i] = first[1];
      c[i] = first[2];
      d[i] = first[3];
    }
    PhiloxKey round_key = key;
    for (int round = 0; round < 10; ++round) {
      for (std::size_t i = 0; i < kLanes; ++i) {
        const std::uint64_t even = std::uint64_t{0xD2511F53} * a[i];
        const std::uint64_t odd = std::uint64_t{0xCD9E8D57} * c[i];
        a[i] = static_cast<std::uint32_t>(odd >> 32U) ^ b[i] ^ round_key[0];
        b[i] = static_cast<std::uint32_t>(odd);
        c[i] = static_cast<std::uint32_t>(even >> 32U) ^ d[i] ^ round_key[1];
        d[i] = static_cast<std::uint32_t>(even);
      }
      round_key[0] += 0x9E3779B9;
      round_key[1] += 0xBB67AE85;
    }
    // The same word of four consecutive counters holds the bits of eight keys.
    static_assert(std::endian::native == std::endian::little);
    for (std::size_t block = 0; block < kBlocks; ++block) {
      std::uint16_t* const to = bits.data() + kDropoutBlock * (begin + block);
      std::memcpy(to, a + 4 * block, 16);
      std::memcpy(to + 8, b + 4 * block, 16);
      std::memcpy(to + 16, c + 4 * block, 16);
      std::memcpy(to + 24, d + 4 * block, 16);
    }
  }
}

void zero_below(const std::uint16_t* HWY_RESTRICT bits, std::uint32_t threshold, std::int64_t count,
                float* HWY_RESTRICT weights) {
  namespace hn = hwy::HWY_NAMESPACE;
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
