#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <annulus/core/convert.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

bool same(float a, float b) {
  // Vector units may set the quiet bit of a NaN, so any NaN will do.
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

template <class Half>
void check_all_patterns() {
  std::vector<Half> source(0x10000);
  for (std::size_t i = 0; i < source.size(); ++i) source[i].bits = static_cast<std::uint16_t>(i);
  std::vector<float> widened(source.size());
  to_float32(source.data(), dtype_of<Half>, widened.data(), 0x10000);
  for (std::size_t i = 0; i < source.size(); ++i) {
    ASSERT_TRUE(same(widened[i], static_cast<float>(source[i]))) << i;
  }
}

template <class Half>
void check_odd_lengths_and_offsets() {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> values(-300.0F, 300.0F);
  for (std::size_t offset = 0; offset < 3; ++offset) {
    for (std::size_t count = 0; count < 70; ++count) {
      std::vector<float> source(offset + count);
      for (float& value : source) value = values(random);
      // One guard element behind the end must stay as it is.
      std::vector<Half> rounded(offset + count + 1, Half(99.0F));
      from_float32(source.data() + offset, dtype_of<Half>, rounded.data() + offset,
                   static_cast<std::int64_t>(count));
      std::vector<float> widened(offset + count + 1, 99.0F);
      to_float32(rounded.data() + offset, dtype_of<Half>, widened.data() + offset,
                 static_cast<std::int64_t>(count));
      for (std::size_t i = offset; i < offset + count; ++i) {
        ASSERT_EQ(rounded[i].bits, Half(source[i]).bits);
        ASSERT_TRUE(same(widened[i], static_cast<float>(rounded[i])));
      }
      ASSERT_EQ(rounded.back().bits, Half(99.0F).bits);
      ASSERT_EQ(widened.back(), 99.0F);
    }
  }
}

// On each instruction set of this CPU.
class Convert : public ::testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(Convert, Float16EveryPattern) {
  check_all_patterns<Float16>();
}
TEST_P(Convert, BFloat16EveryPattern) {
  check_all_patterns<BFloat16>();
}
TEST_P(Convert, Float16AnyLength) {
  check_odd_lengths_and_offsets<Float16>();
}
TEST_P(Convert, BFloat16AnyLength) {
  check_odd_lengths_and_offsets<BFloat16>();
}

TEST_P(Convert, Float16RoundsLikeTheScalarForArbitraryBits) {
  std::mt19937 random(11);
  std::vector<float> source(1 << 16);
  for (float& value : source) value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  // Ties between neighbouring halves, and one float to either side of each.
  for (std::uint32_t bits = 0; bits < 0x7c00; bits += 7) {
    Float16 below;
    Float16 above;
    below.bits = static_cast<std::uint16_t>(bits);
    above.bits = static_cast<std::uint16_t>(bits + 1);
    const float tie = (static_cast<float>(below) + static_cast<float>(above)) / 2;
    for (const float value : {tie, std::nextafter(tie, 0.0F), std::nextafter(tie, 1e30F)}) {
      source.push_back(value);
      source.push_back(-value);
    }
  }
  std::vector<Float16> rounded(source.size());
  from_float32(source.data(), DType::float16, rounded.data(),
               static_cast<std::int64_t>(source.size()));
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (std::isnan(source[i])) {
      ASSERT_TRUE(std::isnan(static_cast<float>(rounded[i])));
    } else {
      ASSERT_EQ(rounded[i].bits, Float16(source[i]).bits) << source[i];
    }
  }
}

TEST_P(Convert, RoundsSpecialValuesInBulk) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> source{0.0F,     -0.0F,  kInfinity, -kInfinity, 65519.9F, 65520.0F,
                                  0x1p-24F, 1e-40F, 1e38F,     -1e38F,     0x1p-25F, std::nanf("")};
  const auto count = static_cast<std::int64_t>(source.size());
  std::vector<Float16> half(source.size());
  std::vector<BFloat16> brain(source.size());
  from_float32(source.data(), DType::float16, half.data(), count);
  from_float32(source.data(), DType::bfloat16, brain.data(), count);
  for (std::size_t i = 0; i < source.size(); ++i) {
    EXPECT_EQ(half[i].bits, Float16(source[i]).bits) << source[i];
    EXPECT_EQ(brain[i].bits, BFloat16(source[i]).bits) << source[i];
  }
}

TEST_P(Convert, Float32IsACopy) {
  const std::vector<float> source{1.5F, -2.0F, 3e-41F};
  std::vector<float> copied(3);
  std::vector<float> back(3);
  to_float32(source.data(), DType::float32, copied.data(), 3);
  from_float32(copied.data(), DType::float32, back.data(), 3);
  EXPECT_EQ(copied, source);
  EXPECT_EQ(back, source);
}

TEST_P(Convert, RefusesOtherTypes) {
  float value = 0;
  std::int32_t number = 0;
  EXPECT_THROW(to_float32(&number, DType::int32, &value, 1), InternalError);
  EXPECT_THROW(from_float32(&value, DType::int32, &number, 1), InternalError);
}

INSTANTIATE_TEST_SUITE_P(, Convert, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

}  // namespace
}  // namespace annulus
