// The arithmetic of the flash kernels' soft cap, against std::tanh.
#include "flash/small_tanh.hpp"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "flash/tanh_series.hpp"

namespace annulus::test {
namespace {

using flash::SmallTanh;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// As the kernels compute it.
float value_of(const float (&c)[3], float x) {
  const float u = x * x;
  return x * std::fma(std::fma(c[2], u, c[1]), u, c[0]);
}

TEST(SmallTanh, IsAccurateUnderEveryCap) {
  int polynomials = 0;
  for (double cap = 1e-38; cap < 3e38; cap *= 1.7) {
    for (const double logit_scale : {0.0442, 0.125, 1.0}) {
      const float bound = SmallTanh::computable(cap);
      const auto scale = static_cast<float>(logit_scale / bound);
      ASSERT_TRUE(std::isnormal(scale)) << cap;
      const SmallTanh small(scale, bound);
      if (small.limit < 0) continue;
      ++polynomials;
      float before = -1;
      for (int i = 0; i <= 1000; ++i) {
        const float x = small.limit * (static_cast<float>(i) / 1000);
        const double right = bound * std::tanh(double{x} * scale);
        // Besides, float32 rounds.
        const double most = SmallTanh::kError + 4e-7 * std::abs(right);
        const float plain = value_of(small.plain, x);
        ASSERT_NEAR(double{plain} * bound, right, most) << cap << " at " << x;
        ASSERT_NEAR(value_of(small.scaled, x) / 1.4426950408889634, right, most) << cap;
        ASSERT_GE(plain, before) << cap << " at " << x;
        before = plain;
        ASSERT_EQ(value_of(small.plain, -x), -plain);
      }
      // Hidden scores stay hidden.
      EXPECT_EQ(value_of(small.plain, -kInfinity), -kInfinity) << cap;
      EXPECT_EQ(value_of(small.scaled, -kInfinity), -kInfinity) << cap;
    }
  }
  EXPECT_GT(polynomials, 100);
}

// Caps that models have: the polynomial spares them exponentials up to 0.4 of the cap at least.
TEST(SmallTanh, ServesDefaultCaps) {
  for (const float cap : {15.0F, 20.0F, 30.0F, 50.0F, 100.0F, 200.0F}) {
    const float scale = 0.088F / cap;
    EXPECT_GE(SmallTanh(scale, cap).limit * scale, 0.4F) << cap;
    EXPECT_FALSE(SmallTanh::needs_accuracy(cap)) << cap;
  }
}

TEST(SmallTanh, HasNoneWhereValuesWouldNotRise) {
  EXPECT_LT(SmallTanh(-0.01F, 30).limit, 0);
  EXPECT_LT(SmallTanh(0, 30).limit, 0);
  EXPECT_LT(SmallTanh(1e-11F, 1e10F).limit, 0);  // x⁵ would have a coefficient of 0
  EXPECT_LT(SmallTanh(1e29F, 1e-30F).limit, 0);  // or an infinite one
}

TEST(TanhSeries, IsAccurate) {
  for (float x = 1e-35F; x <= flash::kTanhSeriesLimit; x *= 1.1F) {
    const double right = std::tanh(double{x});
    ASSERT_NEAR(flash::tanh_series(x) / right, 1, 2e-7) << x;
    ASSERT_EQ(flash::tanh_series(-x), -flash::tanh_series(x));
  }
  EXPECT_EQ(flash::tanh_series(0), 0);
}

TEST(SmallTanh, ComputableCapsGiveTheSameLogits) {
  for (const double cap : {1.2e-38, 1e-20, 30.0, 1e10, 3.4e38}) {
    const double other = SmallTanh::computable(cap);
    for (const double logit : {1e-10, 1.0, 1e5, 1e25}) {
      const double right = cap * std::tanh(logit / cap);
      EXPECT_NEAR(other * std::tanh(logit / other), right, 1e-7 * std::abs(right) + 1e-29);
    }
  }
}

}  // namespace
}  // namespace annulus::test
