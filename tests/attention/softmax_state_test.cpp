#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/random_tensor.hpp"

namespace annulus::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct OwnedState {
  explicit OwnedState(const Extents& shape)
      : output(DType::float32, shape, test_memory()),
        lse(DType::float32, {shape[0], shape[2], shape[1]}, test_memory()) {}
  [[nodiscard]] SoftmaxState state() const { return {output.view(), lse.view()}; }
  [[nodiscard]] std::vector<float> all() const {
    const auto* o = output.view().as<float>();
    const auto* l = lse.view().as<float>();
    std::vector<float> values(o, o + output.view().elements());
    values.insert(values.end(), l, l + lse.view().elements());
    return values;
  }
  Tensor output;
  Tensor lse;
};

OwnedState random_state(Random& random, const Extents& shape, float lse_centre) {
  OwnedState state(shape);
  std::normal_distribution<float> normal;
  float* output = state.output.view().as<float>();
  std::generate_n(output, shape.product(), [&] { return normal(random); });
  float* lse = state.lse.view().as<float>();
  std::generate_n(lse, state.lse.view().elements(), [&] { return lse_centre + normal(random); });
  return state;
}

bool same_bits(const OwnedState& a, const OwnedState& b) {
  const std::vector<float> x = a.all();
  const std::vector<float> y = b.all();
  return std::equal(x.begin(), x.end(), y.begin(), y.end(), [](float p, float q) {
    return std::bit_cast<std::uint32_t>(p) == std::bit_cast<std::uint32_t>(q);
  });
}

// Rows as softmax sums of logits over values, in float64: what merging pieces must give.
struct Sums {
  std::vector<double> logits;
  std::vector<double> values;
};

void fill(const OwnedState& state, const Sums& sums, std::size_t begin, std::size_t end) {
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
    OwnedState whole({1, 1, 1, 1});
    fill(whole, sums, 0, 64);
    std::vector<std::size_t> cuts{0, 64};
    const int parts = 2 + repeat % 9;
    for (int i = 1; i < parts; ++i) cuts.push_back(static_cast<std::size_t>(draw(random, 0, 64)));
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::size_t> order(cuts.size() - 1);
    std::iota(order.begin(), order.end(), 0U);
    std::shuffle(order.begin(), order.end(), random);
    OwnedState merged({1, 1, 1, 1});
    reset(merged.state());
    for (const std::size_t part : order) {
      OwnedState one({1, 1, 1, 1});
      fill(one, sums, cuts[part], cuts[part + 1]);
      merge(merged.state(), one.state());
    }
    const std::vector<float> got = merged.all();
    const std::vector<float> want = whole.all();
    const double tolerance = parts * (2 * lse_rounding + 0x1p-23);
    EXPECT_NEAR(got[0], want[0], 3 * tolerance);
    EXPECT_NEAR(got[1], want[1], tolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Lse, SoftmaxStateAround, ::testing::Values(0.0F, 8.0F, -1e4F, 1e4F));

TEST(SoftmaxState, CombiningIsMergingInOrder) {
  Random random(5);
  const Extents shape{2, 6, 4, 8};
  std::vector<OwnedState> states;
  for (int i = 0; i < 4; ++i) states.push_back(random_state(random, shape, 3.0F));
  states[1].state().set_lse_at(0, 0, 0, -kInfinity);
  // The second covers the lower rows, the third some heads, the fourth everything.
  const auto part = [&](std::size_t i, std::int64_t row, std::int64_t head) {
    const SoftmaxState rows = states[i].state().rows({LocalPosition(row), shape[1] - row});
    return PartialState{
        {rows.output.slice(2, head, shape[2] - head), rows.lse.slice(1, head, shape[2] - head)},
        row,
        head};
  };
  const std::vector<PartialState> parts{part(0, 1, 1), part(1, 3, 1), part(2, 1, 2), part(3, 2, 1)};
  OwnedState expected(shape);
  reset(expected.state());
  for (const PartialState& one : parts) {
    const SoftmaxState rows =
        expected.state().rows({LocalPosition(one.first_row), one.state.output.size(1)});
    merge({rows.output.slice(2, one.first_head, one.state.output.size(2)),
           rows.lse.slice(1, one.first_head, one.state.output.size(2))},
          one.state);
  }
  OwnedState result = random_state(random, shape, 0.0F);
  combine(parts, result.state());
  // Merging rounds the LSE every time, combining at the end.
  const std::vector<float> got = result.all();
  const std::vector<float> want_all = expected.all();
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] != want_all[i]) {
      EXPECT_NEAR(got[i], want_all[i], 2e-6) << i;
    }
  }
  // Rows and heads that no part covers are empty.
  EXPECT_EQ(result.state().lse_at(1, 2, 0), -kInfinity);
  EXPECT_EQ(result.state().output.at<float>({1, 4, 0, 3}), 0.0F);

  const Tensor rounded(DType::bfloat16, shape, test_memory());
  combine(parts, {rounded.view(), result.lse.view()});
  const Tensor want(DType::bfloat16, shape, test_memory());
  round_output(result.state(), want.view());
  EXPECT_EQ(std::memcmp(rounded.view().data(), want.view().data(), want.bytes()), 0);
}

TEST(SoftmaxState, CombinesInPlace) {
  Random random(6);
  const Extents shape{1, 5, 2, 3};
  const OwnedState first = random_state(random, shape, 1.0F);
  const OwnedState second = random_state(random, shape, 1.0F);
  OwnedState expected(shape);
  combine(std::vector<PartialState>{{first.state(), 0, 0}, {second.state(), 0, 0}},
          expected.state());
  combine(std::vector<PartialState>{{first.state(), 0, 0}, {second.state(), 0, 0}}, first.state());
  EXPECT_TRUE(same_bits(first, expected));
}

TEST(SoftmaxState, EqualPartsWeighTheSame) {
  OwnedState state({1, 1, 1, 2});
  OwnedState partial({1, 1, 1, 2});
  std::copy_n(std::array{1.0F, -2.0F}.begin(), 2, state.output.view().as<float>());
  std::copy_n(std::array{3.0F, 2.0F}.begin(), 2, partial.output.view().as<float>());
  *state.lse.view().as<float>() = *partial.lse.view().as<float>() = 5.0F;
  merge(state.state(), partial.state());
  EXPECT_EQ(state.all(), (std::vector<float>{2.0F, 0.0F, 5.0F + std::log(2.0F)}));
}

TEST(SoftmaxState, EmptyElementsChangeNoBit) {
  Random random(4);
  const Extents shape{2, 3, 4, 5};
  const OwnedState original = random_state(random, shape, -1e4F);
  OwnedState empty(shape);
  reset(empty.state());
  // What an empty partial holds in its output must not matter.
  std::fill_n(empty.output.view().as<float>(), shape.product(), std::nanf(""));

  OwnedState state(shape);
  reset(state.state());
  merge(state.state(), original.state());
  EXPECT_TRUE(same_bits(state, original)) << "empty · partial";
  merge(state.state(), empty.state());
  EXPECT_TRUE(same_bits(state, original)) << "state · empty";

  OwnedState nothing(shape);
  reset(nothing.state());
  merge(nothing.state(), empty.state());
  for (const float value : std::vector<float>(nothing.output.view().as<float>(),
                                              nothing.output.view().as<float>() + 120)) {
    EXPECT_EQ(value, 0.0F);
  }
  for (int i = 0; i < 24; ++i) EXPECT_EQ(nothing.lse.view().as<float>()[i], -kInfinity);
}

TEST(SoftmaxState, FarApartPartsDoNotOverflow) {
  for (const float far : {200.0F, 1e4F, 3e38F}) {
    OwnedState state({1, 1, 1, 1});
    OwnedState partial({1, 1, 1, 1});
    *state.output.view().as<float>() = 1.0F;
    *state.lse.view().as<float>() = -far;
    *partial.output.view().as<float>() = 2.0F;
    *partial.lse.view().as<float>() = far;
    OwnedState other({1, 1, 1, 1});
    merge(state.state(), partial.state());
    EXPECT_EQ(state.all(), partial.all());
    *other.output.view().as<float>() = 1.0F;
    *other.lse.view().as<float>() = -far;
    merge(partial.state(), other.state());
    EXPECT_EQ(state.all(), partial.all());
  }
}

TEST(SoftmaxState, WorksThroughAnyStrides) {
  Random random(5);
  const std::int64_t batch = 2;
  const std::int64_t rows = 3;
  const std::int64_t heads = 4;
  const std::int64_t dim = 7;
  const Extents shape{batch, rows, heads, dim};
  OwnedState plain = random_state(random, shape, 0);
  const OwnedState partial = random_state(random, shape, 0);
  // The same state with heads outermost, and rows padded.
  const Tensor output(DType::float32, {batch, heads, rows, dim + 2}, test_memory());
  const Tensor lse(DType::float32, {batch, rows, heads}, test_memory());
  const SoftmaxState strided{output.view().permute({0, 2, 1, 3}).slice(3, 0, dim),
                             lse.view().permute({0, 2, 1})};
  reset(strided);
  merge(strided, plain.state());
  // Row by row there; all at once here.
  for (std::int64_t t = 0; t < rows; ++t) {
    const LocalRange row{LocalPosition(t), 1};
    merge(strided.rows(row), partial.state().rows(row));
  }
  merge(plain.state(), partial.state());
  const OwnedState back(shape);
  copy(strided.output, back.output.view());
  copy(strided.lse, back.lse.view());
  EXPECT_TRUE(same_bits(back, plain));

  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    const Tensor together(dtype, shape, test_memory());
    const Tensor apart(dtype, shape, test_memory());
    round_output(plain.state(), together.view());
    round_output(strided, apart.view());
    const auto* a = static_cast<const std::byte*>(together.view().data());
    const auto* b = static_cast<const std::byte*>(apart.view().data());
    EXPECT_TRUE(std::equal(a, a + together.bytes(), b));
    const Tensor rounded =
        tensor_of(dtype, shape,
                  std::vector<float>(plain.output.view().as<float>(),
                                     plain.output.view().as<float>() + shape.product()));
    const auto* c = static_cast<const std::byte*>(rounded.view().data());
    EXPECT_TRUE(std::equal(a, a + together.bytes(), c));
  }
}

TEST(SoftmaxState, KeepsAFloat64LseExactly) {
  Random random(29);
  const Extents shape{1, 5, 2, 3};
  const OwnedState first = random_state(random, shape, 9);
  const OwnedState second = random_state(random, shape, 9);
  const Tensor output(DType::float32, shape, test_memory());
  const Tensor lse(DType::float64, {1, 2, 5}, test_memory());
  const SoftmaxState wide{output.view(), lse.view()};
  reset(wide);
  EXPECT_EQ(wide.lse_at(0, 1, 4), -std::numeric_limits<double>::infinity());
  merge(wide, first.state());
  merge(wide, second.state());
  const Tensor rounded(DType::float32, {1, 2, 5}, test_memory());
  round_lse(wide, rounded.view());
  for (std::int64_t n = 0; n < 2; ++n) {
    for (std::int64_t t = 0; t < 5; ++t) {
      const double sum =
          std::exp(first.state().lse_at(0, n, t)) + std::exp(second.state().lse_at(0, n, t));
      EXPECT_NEAR(wide.lse_at(0, n, t), std::log(sum), 1e-14);
      EXPECT_EQ(rounded.view().at<float>({0, n, t}), static_cast<float>(wide.lse_at(0, n, t)));
    }
  }
  merge(first.state(), second.state());
  EXPECT_EQ(std::memcmp(first.output.view().data(), output.view().data(), output.bytes()), 0);
}

TEST(SoftmaxState, RefusesWhatDoesNotFit) {
  const OwnedState state({1, 2, 3, 4});
  const OwnedState other({1, 2, 3, 5});
  EXPECT_THROW(merge(state.state(), other.state()), InternalError);
  EXPECT_THROW(reset({state.output.view(), state.output.view()}), InternalError);
  EXPECT_THROW(reset({state.output.view().permute({0, 1, 3, 2}), state.lse.view()}), InternalError);
  EXPECT_THROW(round_output(state.state(), other.output.view()), InternalError);
  EXPECT_THROW(round_lse(state.state(), state.lse.view().slice(2, 0, 1)), InternalError);
  const Tensor half(DType::float16, {1, 2, 3, 4}, test_memory());
  EXPECT_THROW(reset({half.view(), state.lse.view()}), InternalError);
}

}  // namespace
}  // namespace annulus::test
