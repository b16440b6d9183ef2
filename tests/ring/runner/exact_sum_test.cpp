// Sums that depend neither on the order of their numbers nor on how they are shared out.
#include "exact_sum.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/host_stream.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/ring/local_operations.hpp>

namespace annulus::ring {
namespace {

ExactSum sum_of(const std::vector<double>& numbers) {
  ExactSum parts{};
  for (const double number : numbers) add_exactly(number, parts);
  return parts;
}

double total(const ExactSum& parts) {
  return std::accumulate(parts.rbegin(), parts.rend(), 0.0);
}

// Returns random numbers with magnitudes from 2^-60 to 2^60.
std::vector<double> numbers(std::size_t count) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> exponent(-60, 60);
  std::vector<double> result(count);
  for (double& one : result) one = std::ldexp(normal(random), exponent(random));
  return result;
}

TEST(ExactSum, DependsOnNoOrderAndOnNoCut) {
  std::vector<double> all = numbers(1000);
  const ExactSum expected = sum_of(all);
  std::mt19937_64 random(4);
  for (const std::ptrdiff_t cut : {1, 333, 999}) {
    std::shuffle(all.begin(), all.end(), random);
    EXPECT_EQ(sum_of(all), expected);
    const ExactSum more = sum_of({all.begin(), all.begin() + cut});
    ExactSum parts = sum_of({all.begin() + cut, all.end()});
    for (std::size_t i = 0; i < kExactParts; ++i) parts[i] += more[i];
    EXPECT_EQ(parts, expected);
  }
}

TEST(ExactSum, IsTheSum) {
  EXPECT_EQ(total(sum_of({})), 0);
  for (const double one : {1.0, -0.1, 0x1.fffffffffffffp143, 0x1p-168, -3e-30}) {
    EXPECT_EQ(total(sum_of({one})), one);
  }
  EXPECT_EQ(total(sum_of({0x1p-170})), 0);
  EXPECT_EQ(total(sum_of({1e40, 1.0, -1e40, 0x1p-100})), 1 + 0x1p-100);
}

TEST(ExactSum, KeepsWhatIsNotFinite) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(total(sum_of({1, kInfinity, -5})), kInfinity);
  EXPECT_EQ(total(sum_of({-0x1p144, 1})), -kInfinity);
  EXPECT_TRUE(std::isnan(total(sum_of({kInfinity, 1, -kInfinity}))));
  EXPECT_TRUE(std::isnan(total(sum_of({std::nan(""), 1}))));
}

// A gradient that is rounded to −0 stays the same, wherever it is rounded.
TEST(ExactSum, TheSumOfOnePartIsThePart) {
  const std::array<float, 2> part{-0.0F, 2};
  std::array<float, 2> result{1, 1};
  const Extents shape{1, 1, 1, 2};
  const std::array parts{ConstTensorView(part.data(), DType::float32, shape, Place::host())};
  HostStream stream("compute", Watchdog(Watchdog::Seconds(60)), nullptr);
  make_local_operations(Place::host())
      ->sum(parts, TensorView(result.data(), DType::float32, shape, Place::host()), stream);
  EXPECT_EQ(result, part);
  EXPECT_TRUE(std::signbit(result[0]));
}

}  // namespace
}  // namespace annulus::ring
