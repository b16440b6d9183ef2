#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <utility>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/verification/comparison.hpp>

namespace annulus::verification {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A right answer of [1, 3, 2, 4], whose last row of head 1 sees nothing, to be spoiled.
class Comparison : public ::testing::Test {
 protected:
  void SetUp() override {
    float next = 0.5F;
    for (double& x : truth_.output) x = next += 0.25F;
    for (double& x : truth_.lse) x = next += 0.25F;
    for (std::size_t d = 20; d < 24; ++d) truth_.output[d] = 0;
    truth_.lse[5] = -kInfinity;
    for (std::size_t i = 0; i < truth_.output.size(); ++i) {
      outputs()[i] = static_cast<float>(truth_.output[i]);
    }
    for (std::size_t i = 0; i < truth_.lse.size(); ++i) {
      lses()[i] = static_cast<float>(truth_.lse[i]);
    }
  }

  float* outputs() { return output_.view().as<float>(); }
  float* lses() { return lse_.view().as<float>(); }
  Accuracy result() { return accuracy(compare(truth_, output_.view(), lse_.view()), *self_); }
  bool passes() { return result().within(accuracy_bound(DType::float32, 64)); }

  HostMemoryPool memory_;
  OracleOutput truth_{std::vector<double>(24), std::vector<double>(6)};
  Tensor output_{DType::float32, {1, 3, 2, 4}, memory_};
  Tensor lse_{DType::float32, {1, 2, 3}, memory_};
  std::shared_ptr<Control> self_ = make_self_group()->shared_control();
};

TEST_F(Comparison, TheRightAnswerHasNoError) {
  EXPECT_EQ(result().output, 0);
  EXPECT_EQ(result().lse, 0);
  EXPECT_TRUE(passes());
}

TEST_F(Comparison, OneWrongElementFails) {
  const float right = outputs()[7];
  outputs()[7] = right * 1.001F;
  EXPECT_FALSE(passes());
  outputs()[7] = std::nextafter(right, 10.0F);
  EXPECT_TRUE(passes());
}

TEST_F(Comparison, Float64IsComparedInFloat64) {
  const Tensor wide(DType::float64, output_.shape(), memory_);
  std::copy(truth_.output.begin(), truth_.output.end(), wide.view().as<double>());
  const auto found = [&] { return accuracy(compare(truth_, wide.view(), lse_.view()), *self_); };
  EXPECT_EQ(found().output, 0);
  EXPECT_TRUE(found().within(accuracy_bound(DType::float64, 64)));
  wide.view().as<double>()[7] *= 1 + 1e-12;
  EXPECT_GT(found().output, 0);
  EXPECT_FALSE(found().within(accuracy_bound(DType::float64, 64)));
}

TEST_F(Comparison, ErrorIsRelativeFrobenius) {
  double reference = 0;
  for (const double x : truth_.output) reference += x * x;
  outputs()[0] += 0.25F;
  outputs()[9] -= 0.5F;
  EXPECT_NEAR(result().output, std::sqrt((0.0625 + 0.25) / reference), 1e-12);
}

TEST_F(Comparison, SwappedRowsFail) {
  std::swap_ranges(outputs(), outputs() + 4, outputs() + 8);
  EXPECT_FALSE(passes());
}

TEST_F(Comparison, OneWrongLseFails) {
  lses()[2] += 1e-4F;
  EXPECT_NEAR(result().lse, 1e-4, 1e-6);
  EXPECT_EQ(result().output, 0);
  EXPECT_FALSE(passes());
}

TEST_F(Comparison, NanFailsWhereverItIs) {
  for (const int i : {0, 7, 21}) {
    SetUp();
    outputs()[i] = kNan;
    EXPECT_FALSE(passes()) << "output " << i;
  }
  for (const int i : {0, 5}) {
    SetUp();
    lses()[i] = kNan;
    EXPECT_FALSE(passes()) << "LSE " << i;
  }
  // Neither before nor after a larger deviation is it lost.
  SetUp();
  lses()[0] = kNan;
  lses()[1] += 1;
  EXPECT_FALSE(passes());
}

constexpr double kWideNan = std::numeric_limits<double>::quiet_NaN();

TEST_F(Comparison, NanIsRightWhereTheOracleHasIt) {
  for (std::size_t d = 4; d < 8; ++d) truth_.output[d] = kWideNan;
  truth_.lse[3] = kWideNan;
  EXPECT_FALSE(passes()) << "numbers";
  for (int d = 4; d < 8; ++d) outputs()[d] = kNan;
  EXPECT_FALSE(passes()) << "a number as LSE";
  lses()[3] = kNan;
  EXPECT_TRUE(passes());
  EXPECT_EQ(result().output, 0);
  outputs()[6] = 0;
  EXPECT_FALSE(passes());
  outputs()[6] = kInfinity;
  EXPECT_FALSE(passes());
  outputs()[6] = kNan;
  // Other errors still show.
  outputs()[0] *= 1.001F;
  EXPECT_FALSE(passes());
}

TEST_F(Comparison, ARowWhoseLogitsAreAllMinusInfinityIsNan) {
  for (std::size_t d = 20; d < 24; ++d) truth_.output[d] = kWideNan;
  EXPECT_FALSE(passes());
  for (int d = 20; d < 24; ++d) outputs()[d] = kNan;
  EXPECT_TRUE(passes());
}

TEST_F(Comparison, AnInfinityIsRightWhereTheOracleHasIt) {
  truth_.output[9] = static_cast<double>(kInfinity);
  EXPECT_FALSE(passes());
  for (const float right : {kInfinity, kNan}) {
    outputs()[9] = right;
    EXPECT_TRUE(passes()) << right;
  }
  outputs()[9] = -kInfinity;
  EXPECT_FALSE(passes());
  SetUp();
  truth_.lse[1] = static_cast<double>(kInfinity);
  EXPECT_FALSE(passes());
  lses()[1] = kInfinity;
  EXPECT_TRUE(passes());
}

TEST_F(Comparison, ARowThatSeesNothingMustBeExactlyEmpty) {
  outputs()[20] = 1e-30F;
  EXPECT_FALSE(passes());
  SetUp();
  lses()[5] = -100;
  EXPECT_FALSE(passes());
  SetUp();
  lses()[1] = -kInfinity;
  EXPECT_FALSE(passes());
}

TEST_F(Comparison, AnAnswerThatIsZeroThroughoutIsRightOnlyIfTheTruthIs) {
  for (double& x : truth_.output) x = 0;
  EXPECT_FALSE(passes());
  for (float* x = outputs(); x < outputs() + 24; ++x) *x = 0;
  EXPECT_TRUE(passes());
  truth_.output[3] = 1e-3;
  EXPECT_FALSE(passes());
}

TEST_F(Comparison, ReadsStridedViewsAndHalfTypes) {
  const Tensor half(DType::bfloat16, {1, 2, 3, 4}, memory_);
  const TensorView view = half.view().permute({0, 2, 1, 3});
  for (std::int64_t t = 0; t < 3; ++t) {
    for (std::int64_t n = 0; n < 2; ++n) {
      for (std::int64_t d = 0; d < 4; ++d) {
        view.at<BFloat16>({0, t, n, d}) = BFloat16(output_.view().at<float>({0, t, n, d}));
      }
    }
  }
  // The truth has few bits: bfloat16 holds it.
  EXPECT_EQ(accuracy(compare(truth_, view, lse_.view()), *self_).output, 0);
}

TEST_F(Comparison, DeviationsAddUp) {
  outputs()[0] += 1;
  lses()[0] += 2;
  Deviation sum = compare(truth_, output_.view(), lse_.view());
  const Deviation once = sum;
  sum.add({3, 4, 0.5});
  EXPECT_EQ(sum.difference, once.difference + 3);
  EXPECT_EQ(sum.reference, once.reference + 4);
  EXPECT_EQ(sum.lse, 2);
  sum.add({0, 0, kNan});
  sum.add({0, 0, 1});
  EXPECT_TRUE(std::isnan(sum.lse));
}

TEST_F(Comparison, RefusesOtherRows) {
  EXPECT_THROW(static_cast<void>(compare(truth_, output_.view().slice(1, 0, 2), lse_.view())),
               InternalError);
}

// The same answer, unnormalised: outputs times their sums, which are powers of two.
class UnnormalisedComparison : public Comparison {
 protected:
  void SetUp() override {
    Comparison::SetUp();
    truth_.maximum = truth_.lse;
    for (std::size_t row = 0; row < 6; ++row) {
      const bool empty = row == 5;
      const float sum = empty ? 0.0F : std::ldexp(1.0F, static_cast<int>(row));
      if (!empty) truth_.maximum[row] = truth_.lse[row] - std::log(double{sum});
      sums()[row] = sum;
      maxima()[row] = static_cast<float>(truth_.maximum[row]);
      const std::size_t n = row / 3;
      const std::size_t t = row % 3;
      for (std::size_t d = 0; d < 4 && !empty; ++d) outputs()[(t * 2 + n) * 4 + d] *= sum;
    }
  }

  float* maxima() { return maximum_.view().as<float>(); }
  float* sums() { return sum_.view().as<float>(); }
  Accuracy result() {
    return accuracy(compare(truth_, output_.view(), maximum_.view(), sum_.view()), *self_);
  }
  bool passes() { return result().within(accuracy_bound(DType::float32, 64)); }

  Tensor maximum_{DType::float32, {1, 2, 3}, memory_};
  Tensor sum_{DType::float32, {1, 2, 3}, memory_};
};

TEST_F(UnnormalisedComparison, TheRightAnswerPasses) {
  EXPECT_EQ(result().output, 0);
  EXPECT_LT(result().lse, 1e-6);
}

TEST_F(UnnormalisedComparison, OneWrongNumberFails) {
  outputs()[7] *= 1.001F;
  EXPECT_FALSE(passes());
  SetUp();
  sums()[2] *= 1.001F;
  EXPECT_FALSE(passes());
  SetUp();
  maxima()[4] += 1e-3F;
  EXPECT_FALSE(passes());
  // What is right apart from the reference that was taken is wrong too.
  SetUp();
  maxima()[0] -= std::log(2.0F);
  sums()[0] *= 2;
  for (int d = 0; d < 4; ++d) outputs()[d] *= 2;
  EXPECT_EQ(result().output, 0);
  EXPECT_FALSE(passes());
}

TEST_F(UnnormalisedComparison, NanFailsWhereverItIs) {
  maxima()[1] = kNan;
  EXPECT_FALSE(passes());
  SetUp();
  sums()[1] = kNan;
  EXPECT_FALSE(passes());
  SetUp();
  outputs()[1] = kNan;
  EXPECT_FALSE(passes());
}

TEST_F(UnnormalisedComparison, ARowThatMustBeNanIsNanInAllResults) {
  const auto spoil = [&] {
    SetUp();
    for (std::size_t d = 4; d < 8; ++d) truth_.output[d] = kWideNan;
    truth_.lse[3] = truth_.maximum[3] = kWideNan;
    for (int d = 4; d < 8; ++d) outputs()[d] = kNan;
    maxima()[3] = sums()[3] = kNan;
  };
  spoil();
  EXPECT_TRUE(passes());
  outputs()[5] = 1;
  EXPECT_FALSE(passes());
  spoil();
  maxima()[3] = 1;
  EXPECT_FALSE(passes());
  spoil();
  sums()[3] = 1;
  EXPECT_FALSE(passes());
}

TEST_F(UnnormalisedComparison, ARowThatSeesNothingMustBeExactlyEmpty) {
  for (const auto& [maximum, sum] :
       {std::pair(-kInfinity, 1.0F), std::pair(0.0F, 0.0F), std::pair(-100.0F, 1e-30F)}) {
    SetUp();
    maxima()[5] = maximum;
    sums()[5] = sum;
    EXPECT_FALSE(passes()) << maximum << ' ' << sum;
  }
  SetUp();
  outputs()[20] = 1e-30F;
  EXPECT_FALSE(passes());
  SetUp();
  maxima()[1] = -kInfinity;
  sums()[1] = 0;
  EXPECT_FALSE(passes());
}

TEST_F(UnnormalisedComparison, RefusesOtherRows) {
  EXPECT_THROW(static_cast<void>(
                   compare(truth_, output_.view(), maximum_.view(), sum_.view().slice(2, 0, 2))),
               InternalError);
  truth_.maximum.clear();
  EXPECT_THROW(static_cast<void>(compare(truth_, output_.view(), maximum_.view(), sum_.view())),
               InternalError);
}

}  // namespace
}  // namespace annulus::verification
