#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/dtype.hpp>
#include <annulus/core/error.hpp>

#include "tests/support/thrown_by.hpp"

namespace annulus {
namespace {

// A binary floating format, described independently of the code under test.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  [[nodiscard]] int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  [[nodiscard]] std::uint32_t infinity() const {
    return ((1U << exponent_bits) - 1U) << mantissa_bits;
  }
};
constexpr Format kFloat16{5, 10};
constexpr Format kBFloat16{8, 7};

// The value of the magnitude bits (no sign) of a finite number.
double magnitude_value(Format format, std::uint32_t bits) {
  const auto exponent = static_cast<int>(bits >> format.mantissa_bits);
  const auto mantissa = static_cast<double>(bits & ((1U << format.mantissa_bits) - 1U));
  const double one = std::ldexp(1.0, format.mantissa_bits);
  return exponent == 0
             ? std::ldexp(mantissa, 1 - format.bias() - format.mantissa_bits)
             : std::ldexp(one + mantissa, exponent - format.bias() - format.mantissa_bits);
}

// The nearest number of the format, ties to the even one, found by bisection over all of them.
std::uint32_t nearest(Format format, double value) {
  const std::uint32_t sign = std::signbit(value) ? 0x8000U : 0U;
  const double magnitude = std::fabs(value);
  // The value that infinity would have if the exponents went on: rounding overflows to it.
  std::uint32_t low = 0;
  std::uint32_t high = format.infinity();
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (magnitude_value(format, middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - magnitude_value(format, low);
  const double above = magnitude_value(format, high) - magnitude;
  const bool up = above < below || (above == below && (high & 1U) == 0U);
  return sign | (up ? high : low);
}

template <class Half>
void check_widening(Format format) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    Half half;
    half.bits = static_cast<std::uint16_t>(bits);
    const auto value = static_cast<float>(half);
    const std::uint32_t magnitude = bits & 0x7fffU;
    ASSERT_EQ(std::signbit(value), (bits & 0x8000U) != 0U) << bits;
    if (magnitude > format.infinity()) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(std::isnan(static_cast<float>(Half(value)))) << bits;
      continue;
    }
    if (magnitude == format.infinity()) {
      ASSERT_TRUE(std::isinf(value)) << bits;
    } else {
      ASSERT_EQ(std::fabs(static_cast<double>(value)), magnitude_value(format, magnitude)) << bits;
    }
    ASSERT_EQ(Half(value).bits, bits) << "round trip of " << value;
  }
}

template <class Half>
void check_rounding(Format format) {
  const auto check = [&](float value) {
    ASSERT_EQ(Half(value).bits, nearest(format, static_cast<double>(value)))
        << std::hexfloat << value;
    ASSERT_EQ(Half(-value).bits, nearest(format, -static_cast<double>(value)))
        << std::hexfloat << -value;
  };
  const float infinity = std::numeric_limits<float>::infinity();
  // Every number of the format, every midpoint between two, and the floats beside them.
  for (std::uint32_t bits = 0; bits < format.infinity(); ++bits) {
    const double value = magnitude_value(format, bits);
    const double midpoint = 0.5 * (value + magnitude_value(format, bits + 1));
    for (const double center : {value, midpoint}) {
      const auto near = static_cast<float>(center);
      if (std::isinf(near)) continue;
      check(near);
      check(std::nextafter(near, infinity) == infinity ? near : std::nextafter(near, infinity));
      if (near > 0) check(std::nextafter(near, 0.0F));
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(random()) & 0x7fffffffU);
    if (std::isfinite(value)) check(value);
  }
  EXPECT_EQ(Half(infinity).bits, format.infinity());
  EXPECT_EQ(Half(-infinity).bits, format.infinity() | 0x8000U);
  EXPECT_EQ(Half(std::numeric_limits<float>::max()).bits, format.infinity());
  EXPECT_EQ(Half(-0.0F).bits, 0x8000U);
  EXPECT_EQ(Half(std::numeric_limits<float>::denorm_min()).bits, 0U);
}

template <class Half>
void check_nan() {
  // Whatever its payload: quiet, signalling, lowest and highest bits only.
  for (const std::uint32_t word :
       {0x7fc00000U, 0x7f800001U, 0x7fffffffU, 0xff800001U, 0x7f801000U}) {
    EXPECT_TRUE(std::isnan(static_cast<float>(Half(std::bit_cast<float>(word))))) << word;
  }
}

TEST(Float16, WidensExactly) {
  check_widening<Float16>(kFloat16);
}
TEST(Float16, RoundsToNearestEven) {
  check_rounding<Float16>(kFloat16);
}
TEST(Float16, KeepsNan) {
  check_nan<Float16>();
}
TEST(Float16, OverflowBoundary) {
  EXPECT_EQ(Float16(65504.0F).bits, 0x7bffU);
  EXPECT_EQ(Float16(65519.996F).bits, 0x7bffU);
  EXPECT_EQ(Float16(65520.0F).bits, 0x7c00U);
}
TEST(Float16, SubnormalBoundaries) {
  EXPECT_EQ(Float16(0x1p-24F).bits, 1U);
  EXPECT_EQ(Float16(0x1p-25F).bits, 0U);  // a tie, to even
  EXPECT_EQ(Float16(0x1.8p-24F).bits, 2U);
  EXPECT_EQ(Float16(0x1p-14F).bits, 0x0400U);
}

TEST(BFloat16, WidensExactly) {
  check_widening<BFloat16>(kBFloat16);
}
TEST(BFloat16, RoundsToNearestEven) {
  check_rounding<BFloat16>(kBFloat16);
}
TEST(BFloat16, KeepsNan) {
  check_nan<BFloat16>();
}

TEST(DType, NamesParseBack) {
  for (const DType dtype : {DType::boolean, DType::uint8, DType::int32, DType::float16,
                            DType::bfloat16, DType::float32, DType::float64}) {
    EXPECT_EQ(parse_dtype(name_of(dtype)), dtype);
  }
  EXPECT_EQ(parse_dtype("bf16"), DType::bfloat16);
  EXPECT_EQ(parse_dtype("fp64"), DType::float64);
  const auto error = test::thrown_by<ArgumentError>([&] { (void)parse_dtype("half"); });
  EXPECT_EQ(error.argument(), "dtype");
  EXPECT_EQ(error.value(), "'half'");
  EXPECT_THAT(error.expected(), ::testing::HasSubstr("bfloat16"));
}

TEST(DType, SizesAndRoundoff) {
  EXPECT_EQ(size_of(DType::boolean), sizeof(bool));
  EXPECT_EQ(size_of(DType::int32), 4U);
  EXPECT_EQ(size_of(DType::bfloat16), 2U);
  EXPECT_EQ(size_of(DType::float64), 8U);
  EXPECT_TRUE(is_floating(DType::bfloat16));
  EXPECT_FALSE(is_floating(DType::int32));
  EXPECT_EQ(unit_roundoff(DType::float32), std::numeric_limits<float>::epsilon() / 2);
  EXPECT_EQ(unit_roundoff(DType::float64), std::numeric_limits<double>::epsilon() / 2);
  EXPECT_EQ(unit_roundoff(DType::float16), 0x1p-11);
  EXPECT_EQ(unit_roundoff(DType::bfloat16), 0x1p-8);
  EXPECT_EQ(dtype_of<BFloat16>, DType::bfloat16);
  EXPECT_EQ(dtype_of<bool>, DType::boolean);
}

}  // namespace
}  // namespace annulus
