#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/convert.hpp>
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
    problem_.shape = {1, 3, 64, 2, 1, 4, 4};
    problem_.dtype = DType::float32;
    float next = 0.5F;
    for (double& x : truth_.output) x = next += 0.25F;
    for (double& x : truth_.lse) x = next += 0.25F;
    for (std::size_t d = 20; d < 24; ++d) truth_.output[d] = 0;
    truth_.lse[5] = -kInfinity;
    truth_.terms.assign(6, RowTerms{1, 2, 3});
    truth_.terms[5] = {};
    for (std::size_t i = 0; i < truth_.output.size(); ++i) {
      outputs()[i] = static_cast<float>(truth_.output[i]);
    }
    for (std::size_t i = 0; i < truth_.lse.size(); ++i) {
      lses()[i] = static_cast<float>(truth_.lse[i]);
    }
  }

  float* outputs() { return output_.view().as<float>(); }
  float* lses() { return lse_.view().as<float>(); }
  virtual Accuracy result() {
    return accuracy(compare(problem_, truth_, output_.view(), lse_.view()), *self_);
  }
  bool passes() { return result().within(accuracy_bound(DType::float32, 64)); }
  // The same of the right answer with this change.
  bool passes_with(const auto& change) {
    SetUp();
    change();
    return passes();
  }

  HostMemoryPool memory_;
  AttentionProblem problem_;
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
  const auto found = [&] {
    return accuracy(compare(problem_, truth_, wide.view(), lse_.view()), *self_);
  };
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

// The bounds of a row are row_bound()'s, to the last bit.
TEST_F(Comparison, SharesAreOfTheRowsOwnBound) {
  outputs()[8] += 0.25F;  // row t = 1 of head 0, whose terms are
  truth_.terms[1] = {0.5, 0.75, 9, 2};
  lses()[4] += 0.5F;  // row t = 1 of head 1
  double norm = 0;
  for (std::size_t d = 8; d < 12; ++d) norm += truth_.output[d] * truth_.output[d];
  const double output = row_bound(problem_, truth_.terms[1], std::sqrt(norm)).output;
  const double lse = row_bound(problem_, truth_.terms[4], 1).lse;
  EXPECT_NEAR(result().row_share, 0.25 / output, 1e-6 / output);
  EXPECT_NEAR(result().lse_share, 0.5 / lse, 1e-6 / lse);
}

TEST_F(Comparison, OneWrongLseFails) {
  lses()[2] += 1e-4F;
  EXPECT_NEAR(result().lse, 1e-4, 1e-6);
  EXPECT_EQ(result().output, 0);
  EXPECT_FALSE(passes());
}

TEST_F(Comparison, NanFailsWhereverItIs) {
  for (const int i : {0, 7, 21}) {
    EXPECT_FALSE(passes_with([&] { outputs()[i] = kNan; })) << "output " << i;
  }
  for (const int i : {0, 5}) {
    EXPECT_FALSE(passes_with([&] { lses()[i] = kNan; })) << "LSE " << i;
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
  EXPECT_FALSE(passes_with([&] { outputs()[20] = 1e-30F; }));
  EXPECT_FALSE(passes_with([&] { lses()[5] = -100; }));
  EXPECT_FALSE(passes_with([&] { lses()[1] = -kInfinity; }));
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
  EXPECT_EQ(accuracy(compare(problem_, truth_, view, lse_.view()), *self_).output, 0);
}

TEST_F(Comparison, DeviationsAddUp) {
  outputs()[0] += 1;
  lses()[0] += 2;
  Deviation sum = compare(problem_, truth_, output_.view(), lse_.view());
  const Deviation once = sum;
  EXPECT_EQ(once.rows, 5) << "one of six sees nothing";
  sum.add({3, 4, 0.5, 1e-3, 1e9, 7});
  EXPECT_EQ(sum.rows, 12);
  EXPECT_EQ(sum.difference, once.difference + 3);
  EXPECT_EQ(sum.reference, once.reference + 4);
  EXPECT_EQ(sum.lse, 2);
  EXPECT_EQ(sum.row_share, once.row_share);
  EXPECT_EQ(sum.lse_share, 1e9);
  sum.add({0, 0, kNan, kNan, kNan});
  sum.add({0, 0, 1, 1, 1});
  EXPECT_TRUE(std::isnan(sum.lse));
  EXPECT_TRUE(std::isnan(sum.row_share));
  EXPECT_TRUE(std::isnan(sum.lse_share));
}

TEST_F(Comparison, RefusesOtherRows) {
  EXPECT_THROW(
      static_cast<void>(compare(problem_, truth_, output_.view().slice(1, 0, 2), lse_.view())),
      InternalError);
}

// Thousands of rows, causal: the first rows see few keys and carry the norm, as in long sequences.
class OneRowAmongThousands : public ::testing::TestWithParam<DType> {
 protected:
  static constexpr std::int64_t kRows = 4096;
  static constexpr std::int64_t kDim = 4;

  OneRowAmongThousands() : output_(GetParam(), {1, kRows, 1, kDim}, memory_) {
    problem_.shape = {1, kRows, kRows, 1, 1, kDim, kDim};
    problem_.dtype = GetParam();
    problem_.mask.set_causal(true);
    truth_.lse.assign(kRows, 1.0);
    std::fill_n(lse_.view().as<float>(), kRows, 1.0F);
    for (std::int64_t t = 0; t < kRows; ++t) {
      // t + 1 equal weights of values of norm 2: 1/√(t+1) is left of them.
      const auto seen = static_cast<double>(t + 1);
      for (std::int64_t d = 0; d < kDim; ++d) {
        truth_.output.push_back((d % 2 == 0 ? 1 : -1) / std::sqrt(seen));
      }
      truth_.terms.push_back({2 / std::sqrt(seen), 2, 4});
    }
    std::vector<float> narrow(truth_.output.begin(), truth_.output.end());
    from_float32(narrow.data(), GetParam(), output_.view().data(), output_.shape().product());
  }

  // The row's error becomes `share` of its bound, along its first dimension.
  void spoil(std::int64_t t, double share) {
    const auto first = static_cast<std::size_t>(t * kDim);
    double norm = 0;
    for (std::size_t d = first; d < first + kDim; ++d) {
      norm += truth_.output[d] * truth_.output[d];
    }
    const double bound =
        row_bound(problem_, truth_.terms[static_cast<std::size_t>(t)], std::sqrt(norm)).output;
    const auto wrong = static_cast<float>(truth_.output[first] + share * bound);
    from_float32(&wrong, GetParam(), output_.view().address({0, t, 0, 0}), 1);
  }

  Accuracy result() {
    return accuracy(compare(problem_, truth_, output_.view(), lse_.view()), *self_);
  }

  HostMemoryPool memory_;
  AttentionProblem problem_;
  OracleOutput truth_;
  Tensor output_;
  Tensor lse_{DType::float32, {1, 1, kRows}, memory_};
  std::shared_ptr<Control> self_ = make_self_group()->shared_control();
};

TEST_P(OneRowAmongThousands, FailsWhereTheNormOfTheWholeDoesNot) {
  const AccuracyBound bound = accuracy_bound(problem_);
  EXPECT_TRUE(result().within(bound));
  EXPECT_LT(result().row_share, 0.5);
  spoil(4000, 1.7);
  EXPECT_LE(result().output, bound.output) << "the whole output hides it";
  EXPECT_NEAR(result().row_share, 1.7, 0.3);
  EXPECT_FALSE(result().within(bound));
  spoil(4000, 0.5);
  EXPECT_TRUE(result().within(bound));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, OneRowAmongThousands,
                         ::testing::Values(DType::float32, DType::float16, DType::bfloat16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

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
  Accuracy result() override {
    return accuracy(compare(problem_, truth_, output_.view(), maximum_.view(), sum_.view()),
                    *self_);
  }

  Tensor maximum_{DType::float32, {1, 2, 3}, memory_};
  Tensor sum_{DType::float32, {1, 2, 3}, memory_};
};

TEST_F(UnnormalisedComparison, TheRightAnswerPasses) {
  EXPECT_EQ(result().output, 0);
  EXPECT_LT(result().lse, 1e-6);
}

TEST_F(UnnormalisedComparison, OneWrongNumberFails) {
  EXPECT_FALSE(passes_with([&] { outputs()[7] *= 1.001F; }));
  EXPECT_FALSE(passes_with([&] { sums()[2] *= 1.001F; }));
  EXPECT_FALSE(passes_with([&] { maxima()[4] += 1e-3F; }));
  // A result that is only right by another reference is wrong too.
  SetUp();
  maxima()[0] -= std::log(2.0F);
  sums()[0] *= 2;
  for (int d = 0; d < 4; ++d) outputs()[d] *= 2;
  EXPECT_EQ(result().output, 0);
  EXPECT_FALSE(passes());
}

TEST_F(UnnormalisedComparison, NanFailsWhereverItIs) {
  for (float* number : {&maxima()[1], &sums()[1], &outputs()[1]}) {
    EXPECT_FALSE(passes_with([&] { *number = kNan; }));
  }
}

TEST_F(UnnormalisedComparison, ARowThatMustBeNanIsNanInAllResults) {
  for (std::size_t d = 4; d < 8; ++d) truth_.output[d] = kWideNan;
  truth_.lse[3] = truth_.maximum[3] = kWideNan;
  for (int d = 4; d < 8; ++d) outputs()[d] = kNan;
  maxima()[3] = sums()[3] = kNan;
  EXPECT_TRUE(passes());
  for (float* number : {&outputs()[5], &maxima()[3], &sums()[3]}) {
    *number = 1;
    EXPECT_FALSE(passes());
    *number = kNan;
  }
}

TEST_F(UnnormalisedComparison, ARowThatSeesNothingMustBeExactlyEmpty) {
  for (const auto& [maximum, sum] :
       {std::pair(-kInfinity, 1.0F), std::pair(0.0F, 0.0F), std::pair(-100.0F, 1e-30F)}) {
    SetUp();
    maxima()[5] = maximum;
    sums()[5] = sum;
    EXPECT_FALSE(passes()) << maximum << ' ' << sum;
  }
  EXPECT_FALSE(passes_with([&] { outputs()[20] = 1e-30F; }));
  SetUp();
  maxima()[1] = -kInfinity;
  sums()[1] = 0;
  EXPECT_FALSE(passes());
}

TEST_F(UnnormalisedComparison, RefusesOtherRows) {
  EXPECT_THROW(static_cast<void>(compare(problem_, truth_, output_.view(), maximum_.view(),
                                         sum_.view().slice(2, 0, 2))),
               InternalError);
  truth_.maximum.clear();
  EXPECT_THROW(
      static_cast<void>(compare(problem_, truth_, output_.view(), maximum_.view(), sum_.view())),
      InternalError);
}

}  // namespace
}  // namespace annulus::verification
