#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/native_run.hpp"

namespace annulus::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> all_of(const Result& state) {
  const auto* output = state.output.view().as<float>();
  const auto* lse = state.lse.view().as<float>();
  std::vector<float> values(output, output + state.output.view().elements());
  values.insert(values.end(), lse, lse + state.lse.view().elements());
  return values;
}

Result random_state(Random& random, const Extents& shape, float lse_centre) {
  Result state(shape);
  std::normal_distribution<float> normal;
  float* output = state.output.view().as<float>();
  std::generate_n(output, shape.product(), [&] { return normal(random); });
  float* lse = state.lse.view().as<float>();
  std::generate_n(lse, state.lse.view().elements(), [&] { return lse_centre + normal(random); });
  return state;
}

// Rows as softmax sums of logits over values, in float64: what merging pieces must give.
struct Sums {
  std::vector<double> logits;
  std::vector<double> values;
};

void fill(const Result& state, const Sums& sums, std::size_t begin, std::size_t end) {
  const double max = *std::max_element(sums.logits.begin(), sums.logits.end());
  double sum = 0;
  double output = 0;
  for (std::size_t i = begin; i < end; ++i) {
    sum += std::exp(sums.logits[i] - max);
    output += std::exp(sums.logits[i] - max) * sums.values[i];
  }
  *state.output.view().as<float>() = static_cast<float>(sum > 0 ? output / sum : 0);
  *state.lse.view().as<float>() = static_cast<float>(max + std::log(sum));
}

// All of them cover the whole result.
void combine_whole(const std::vector<SoftmaxState>& states, const SoftmaxState& result) {
  std::vector<PartialState> parts;
  for (const SoftmaxState& state : states) parts.push_back({state, 0, 0});
  combine(parts, result);
}

class SoftmaxStateAround : public ::testing::TestWithParam<float> {};

TEST_P(SoftmaxStateAround, MergingPartsInAnyOrderGivesTheWhole) {
  // Float32 cannot tell LSEs closer than their own rounding apart, so neither can the merge.
  const double lse_rounding = std::abs(GetParam()) * 0x1p-24 + 0x1p-22;
  Random random(3);
  std::normal_distribution<double> normal;
  for (int repeat = 0; repeat < 200; ++repeat) {
    Sums sums;
    for (int i = 0; i < 64; ++i) {
      sums.logits.push_back(GetParam() + 2 * normal(random));
      sums.values.push_back(normal(random));
    }
    Result whole({1, 1, 1, 1});
    fill(whole, sums, 0, 64);
    std::vector<std::size_t> cuts{0, 64};
    const int parts = 2 + repeat % 9;
    for (int i = 1; i < parts; ++i) cuts.push_back(static_cast<std::size_t>(draw(random, 0, 64)));
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::size_t> order(cuts.size() - 1);
    std::iota(order.begin(), order.end(), 0U);
    std::shuffle(order.begin(), order.end(), random);
    Result merged({1, 1, 1, 1});
    std::vector<Result> pieces;
    std::vector<SoftmaxState> states;
    for (const std::size_t part : order) {
      pieces.emplace_back(Extents{1, 1, 1, 1});
      fill(pieces.back(), sums, cuts[part], cuts[part + 1]);
      states.push_back(pieces.back().state());
    }
    combine_whole(states, merged.state());
    const std::vector<float> got = all_of(merged);
    const std::vector<float> want = all_of(whole);
    const double tolerance = parts * (2 * lse_rounding + 0x1p-23);
    EXPECT_NEAR(got[0], want[0], 3 * tolerance);
    EXPECT_NEAR(got[1], want[1], tolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Lse, SoftmaxStateAround, ::testing::Values(0.0F, 8.0F, -1e4F, 1e4F));

TEST(SoftmaxState, EveryRowCombinesThePartsThatCoverIt) {
  Random random(5);
  const Extents shape{2, 6, 4, 8};
  std::vector<Result> states;
  for (int i = 0; i < 4; ++i) states.push_back(random_state(random, shape, 3.0F));
  states[1].state().set_lse_at(0, 0, 0, -kInfinity);
  // The second covers the lower rows, the third some heads, the fourth nearly everything.
  const auto part = [&](std::size_t i, std::int64_t row, std::int64_t head) {
    const SoftmaxState state = states[i].state();
    return PartialState{{state.output.slice(1, row, shape[1] - row).slice(2, head, shape[2] - head),
                         state.lse.slice(1, head, shape[2] - head).slice(2, row, shape[1] - row)},
                        row,
                        head};
  };
  const std::vector<PartialState> parts{part(0, 1, 1), part(1, 3, 1), part(2, 1, 2), part(3, 2, 1)};
  const Result result = random_state(random, shape, 0.0F);
  combine(parts, result.state());
  for_each_of<3>({shape[0], shape[1], shape[2]}, [&](auto b, auto t, auto n) {
    double sum = 0;
    std::vector<double> output(static_cast<std::size_t>(shape[3]));
    for (const PartialState& one : parts) {
      if (!one.covers(t, n)) continue;
      const std::int64_t row = t - one.first_row;
      const std::int64_t head = n - one.first_head;
      const double weight = std::exp(one.state.lse_at(b, head, row));
      sum += weight;
      for (std::int64_t d = 0; d < shape[3]; ++d) {
        output[static_cast<std::size_t>(d)] +=
            weight * one.state.output.at<float>({b, row, head, d});
      }
    }
    for (std::int64_t d = 0; d < shape[3]; ++d) {
      const double want = sum > 0 ? output[static_cast<std::size_t>(d)] / sum : 0;
      EXPECT_NEAR(result.state().output.at<float>({b, t, n, d}), want, 2e-6);
    }
    if (sum > 0) {
      EXPECT_NEAR(result.state().lse_at(b, n, t), std::log(sum), 1e-6);
    } else {
      EXPECT_EQ(result.state().lse_at(b, n, t), -kInfinity);
    }
  });

  const Tensor rounded(DType::bfloat16, shape, test_memory());
  combine(parts, {rounded.view(), result.lse.view()});
  const Tensor want(DType::bfloat16, shape, test_memory());
  from_float32(result.output.view().as<float>(), DType::bfloat16, want.view().data(),
               shape.product());
  EXPECT_EQ(std::memcmp(rounded.view().data(), want.view().data(), want.bytes()), 0);
}

TEST(SoftmaxState, CombinesInPlace) {
  Random random(6);
  const Extents shape{1, 5, 2, 3};
  const Result first = random_state(random, shape, 1.0F);
  const Result second = random_state(random, shape, 1.0F);
  Result expected(shape);
  combine(std::vector<PartialState>{{first.state(), 0, 0}, {second.state(), 0, 0}},
          expected.state());
  combine(std::vector<PartialState>{{first.state(), 0, 0}, {second.state(), 0, 0}}, first.state());
  EXPECT_TRUE(first == expected);
}

TEST(SoftmaxState, EqualPartsWeighTheSame) {
  Result state({1, 1, 1, 2});
  Result partial({1, 1, 1, 2});
  std::copy_n(std::array{1.0F, -2.0F}.begin(), 2, state.output.view().as<float>());
  std::copy_n(std::array{3.0F, 2.0F}.begin(), 2, partial.output.view().as<float>());
  *state.lse.view().as<float>() = *partial.lse.view().as<float>() = 5.0F;
  combine_whole({state.state(), partial.state()}, state.state());
  EXPECT_EQ(all_of(state), (std::vector<float>{2.0F, 0.0F, 5.0F + std::log(2.0F)}));
}

TEST(SoftmaxState, EmptyElementsChangeNoBit) {
  Random random(4);
  const Extents shape{2, 3, 4, 5};
  const Result original = random_state(random, shape, -1e4F);
  Result empty(shape);
  // The output of an empty partial result must not matter, unless it is NaN.
  std::fill_n(empty.output.view().as<float>(), shape.product(), 3.0F);
  std::fill_n(empty.lse.view().as<float>(), empty.lse.view().elements(), -kInfinity);

  Result state(shape);
  combine_whole({empty.state(), original.state()}, state.state());
  EXPECT_TRUE(state == original) << "empty · partial";
  combine_whole({original.state(), empty.state()}, state.state());
  EXPECT_TRUE(state == original) << "partial · empty";

  for (const std::vector<SoftmaxState>& parts :
       {std::vector<SoftmaxState>{}, {empty.state(), empty.state()}}) {
    Result nothing = random_state(random, shape, 0);
    combine_whole(parts, nothing.state());
    const auto* values = nothing.output.view().as<float>();
    EXPECT_TRUE(std::all_of(values, values + 120, [](float value) { return value == 0.0F; }));
    for (int i = 0; i < 24; ++i) EXPECT_EQ(nothing.lse.view().as<float>()[i], -kInfinity);
  }
}

TEST(SoftmaxState, PartsOfNoWeightYieldToOthersButNotToNothing) {
  Random random(6);
  const Extents shape{2, 3, 4, 5};
  const Result original = random_state(random, shape, -1e4F);
  Result empty(shape);
  Result weightless(shape);
  for (Result* state : {&empty, &weightless}) {
    std::fill_n(state->lse.view().as<float>(), state->lse.view().elements(), -kInfinity);
    std::fill_n(state->output.view().as<float>(), shape.product(),
                state == &empty ? 0.0F : std::nanf(""));
  }
  Result result(shape);
  combine_whole({weightless.state(), original.state()}, result.state());
  EXPECT_TRUE(result == original);
  combine_whole({original.state(), weightless.state()}, result.state());
  EXPECT_TRUE(result == original);
  for (const std::vector<SoftmaxState>& parts : {std::vector<SoftmaxState>{weightless.state()},
                                                 {empty.state(), weightless.state()},
                                                 {weightless.state(), empty.state()}}) {
    combine_whole(parts, result.state());
    const auto* values = result.output.view().as<float>();
    EXPECT_TRUE(std::all_of(values, values + 120, [](float value) { return std::isnan(value); }));
    for (int i = 0; i < 24; ++i) EXPECT_EQ(result.lse.view().as<float>()[i], -kInfinity);
  }
}

TEST(SoftmaxState, FarApartPartsDoNotOverflow) {
  for (const float far : {200.0F, 1e4F, 3e38F}) {
    Result state({1, 1, 1, 1});
    Result partial({1, 1, 1, 1});
    *state.output.view().as<float>() = 1.0F;
    *state.lse.view().as<float>() = -far;
    *partial.output.view().as<float>() = 2.0F;
    *partial.lse.view().as<float>() = far;
    const Result result({1, 1, 1, 1});
    combine_whole({state.state(), partial.state()}, result.state());
    EXPECT_EQ(all_of(result), all_of(partial));
    combine_whole({partial.state(), state.state()}, result.state());
    EXPECT_EQ(all_of(result), all_of(partial));
  }
}

// Sinks of large logits leave little of a row, but not fewer of its digits.
TEST(SoftmaxState, ASmallWeightHasAllItsDigits) {
  const auto state_of = [](float output, float lse) {
    Result state({1, 1, 1, 1});
    *state.output.view().as<float>() = output;
    *state.lse.view().as<float>() = lse;
    return state;
  };
  const Result row = state_of(1, -5);
  for (const float sink : {2.0F, 20.0F, 40.0F}) {
    const Result sinks = state_of(0, sink);
    const double weight = 1 / (1 + std::exp(double{sink} + 5));
    for (const auto& parts :
         {std::vector{row.state(), sinks.state()}, std::vector{sinks.state(), row.state()}}) {
      const Result merged({1, 1, 1, 1});
      combine_whole(parts, merged.state());
      EXPECT_NEAR(*merged.output.view().as<float>() / weight, 1, 1e-6) << sink;
    }
  }
}

TEST(SoftmaxState, WorksThroughAnyStrides) {
  Random random(5);
  const std::int64_t batch = 2;
  const std::int64_t rows = 3;
  const std::int64_t heads = 4;
  const std::int64_t dim = 7;
  const Extents shape{batch, rows, heads, dim};
  const Result plain = random_state(random, shape, 0);
  const Result partial = random_state(random, shape, 0);
  // The same state with heads outermost, and rows padded.
  const Tensor output(DType::float32, {batch, heads, rows, dim + 2}, test_memory());
  const Tensor lse(DType::float32, {batch, rows, heads}, test_memory());
  const SoftmaxState strided{output.view().permute({0, 2, 1, 3}).slice(3, 0, dim),
                             lse.view().permute({0, 2, 1})};
  copy(plain.output.view(), strided.output);
  copy(plain.lse.view(), strided.lse);
  combine_whole({strided, partial.state()}, strided);
  combine_whole({plain.state(), partial.state()}, plain.state());
  const Result back(shape);
  copy(strided.output, back.output.view());
  copy(strided.lse, back.lse.view());
  EXPECT_TRUE(back == plain);

  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    const Tensor rounded(dtype, shape, test_memory());
    combine_whole({strided}, {rounded.view(), back.lse.view()});
    const Tensor want =
        tensor_of(dtype, shape,
                  std::vector<float>(plain.output.view().as<float>(),
                                     plain.output.view().as<float>() + shape.product()));
    EXPECT_EQ(std::memcmp(rounded.view().data(), want.view().data(), want.bytes()), 0);
  }
}

TEST(SoftmaxState, KeepsAFloat64LseExactly) {
  Random random(29);
  const Extents shape{1, 5, 2, 3};
  const Result first = random_state(random, shape, 9);
  const Result second = random_state(random, shape, 9);
  const Tensor output(DType::float32, shape, test_memory());
  const Tensor lse(DType::float64, {1, 2, 5}, test_memory());
  const SoftmaxState wide{output.view(), lse.view()};
  combine_whole({}, wide);
  EXPECT_EQ(wide.lse_at(0, 1, 4), -std::numeric_limits<double>::infinity());
  combine_whole({first.state(), second.state()}, wide);
  const Result narrow(shape);
  combine_whole({first.state(), second.state()}, narrow.state());
  for (std::int64_t n = 0; n < 2; ++n) {
    for (std::int64_t t = 0; t < 5; ++t) {
      const double sum =
          std::exp(first.state().lse_at(0, n, t)) + std::exp(second.state().lse_at(0, n, t));
      EXPECT_NEAR(wide.lse_at(0, n, t), std::log(sum), 1e-14);
      EXPECT_EQ(narrow.state().lse_at(0, n, t), static_cast<float>(wide.lse_at(0, n, t)));
    }
  }
  EXPECT_EQ(std::memcmp(narrow.output.view().data(), output.view().data(), output.bytes()), 0);
}

TEST(SoftmaxState, MergesFloat64OutputsInFloat64) {
  const auto state = [](double output, double lse) {
    Tensor o(DType::float64, {1, 1, 1, 2}, test_memory());
    Tensor l(DType::float64, {1, 1, 1}, test_memory());
    o.view().as<double>()[0] = o.view().as<double>()[1] = output;
    l.view().as<double>()[0] = lse;
    return std::pair(std::move(o), std::move(l));
  };
  const auto [first, first_lse] = state(1.0 / 3, std::log(1.0));
  const auto [second, second_lse] = state(-1.0 / 7, std::log(3.0));
  const auto [result, result_lse] = state(9, 9);
  const SoftmaxState whole{result.view(), result_lse.view()};
  combine_whole({{first.view(), first_lse.view()}, {second.view(), second_lse.view()}}, whole);
  EXPECT_NEAR(result.view().as<double>()[1], (1.0 / 3 - 3.0 / 7) / 4, 1e-16);
  EXPECT_NEAR(result_lse.view().as<double>()[0], std::log(4.0), 1e-15);
  combine_whole({{first.view(), first_lse.view()}}, whole);
  EXPECT_EQ(result.view().as<double>()[0], 1.0 / 3);
  combine_whole({}, whole);
  EXPECT_EQ(result.view().as<double>()[0], 0);
  // Parts that were rounded to float32 are refused.
  const Tensor narrow(DType::float32, {1, 1, 1, 2}, test_memory());
  EXPECT_THROW(combine_whole({{narrow.view(), first_lse.view()}}, whole), InternalError);
  EXPECT_THROW(combine_whole({{first.view(), first_lse.view()}}, {narrow.view(), first_lse.view()}),
               InternalError);
}

TEST(SoftmaxState, RefusesWhatDoesNotFit) {
  const Result state({1, 2, 3, 4});
  const Result other({1, 2, 3, 5});
  const Tensor half(DType::float16, {1, 2, 3, 4}, test_memory());
  const SoftmaxState whole = state.state();
  EXPECT_THROW(combine_whole({other.state()}, whole), InternalError);
  EXPECT_THROW(combine_whole({{half.view(), whole.lse}}, whole), InternalError);
  EXPECT_THROW(combine(std::vector<PartialState>{{whole, 1, 0}}, whole), InternalError);
  EXPECT_THROW(combine(std::vector<PartialState>{{whole, 0, -1}}, whole), InternalError);
  EXPECT_THROW(combine_whole({}, {whole.output, whole.output}), InternalError);
  EXPECT_THROW(combine_whole({}, {whole.output, whole.lse.slice(2, 0, 1)}), InternalError);
  EXPECT_THROW(combine_whole({}, {whole.output.permute({0, 1, 3, 2}), whole.lse}), InternalError);
  EXPECT_THROW(combine_whole({}, {whole.output, half.view()}), InternalError);
}

}  // namespace
}  // namespace annulus::test
