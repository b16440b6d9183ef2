#include "native/row_dropout.hpp"

#include <algorithm>

#include <annulus/attention/philox.hpp>

// Highway compiles the part below once per instruction set and picks one at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "native/row_dropout.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace annulus::HWY_NAMESPACE {

// The compiler makes vectors of the loops. `first` holds the first counter.
void draw_bits(PhiloxKey key, const PhiloxCounter& first, std::size_t blocks, DropoutBits& bits) {
  constexpr std::size_t kTogether = 16;  // counters
  std::array<std::array<std::uint32_t, 4 * kMostDropoutBlocks>, 4> words;
  for (std::size_t begin = 0; begin < 4 * blocks; begin += kTogether) {
    for (std::size_t i = begin; i < begin + kTogether; ++i) {
      const PhiloxCounter drawn =
          philox({first[0] + static_cast<std::uint32_t>(i), first[1], first[2], first[3]}, key);
      for (std::size_t word = 0; word < 4; ++word) words[word][i] = drawn[word];
    }
  }
  std::uint16_t* HWY_RESTRICT next = bits.data();
  for (std::size_t block = 0; block < blocks; ++block) {
    for (std::size_t word = 0; word < 4; ++word) {
      for (std::size_t pair = 0; pair < 4; ++pair, next += 2) {
        const std::uint32_t both = words[word][4 * block + pair];
        next[0] = static_cast<std::uint16_t>(both);
        next[1] = static_cast<std::uint16_t>(both >> 16U);
      }
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
