// Bias and dense mask through the public interface, on CPU ranks.
#include <algorithm>
#include <span>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/core/error.hpp>

#include "tests/ring/face/face_cases.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A rank's rows of a bias and of a mask, for all keys, from functions of the global position.
struct Scores {
  explicit Scores(const Attention& attention)
      : bias(static_cast<std::size_t>(attention.bias_shape().product())),
        mask(static_cast<std::size_t>(attention.mask_shape().product())) {
    fill(bias, attention.bias_shape(), attention.query_positions(), bias_at);
    fill(mask, attention.mask_shape(), attention.query_positions(), mask_at);
  }
  static float bias_at(std::int64_t n, std::int64_t row, std::int64_t column) {
    return static_cast<float>((7 * n + 3 * row + 5 * column) % 11) / 4 - 1;
  }
  static std::uint8_t mask_at(std::int64_t n, std::int64_t row, std::int64_t column) {
    return row != column && (n + 2 * row + column) % 3 == 0 ? 0 : 1;  // every row sees itself
  }
  template <class Entry, class At>
  static void fill(std::vector<Entry>& entries, const Extents& shape, const PositionRanges& rows,
                   const At& at) {
    if (shape.rank() == 0) return;
    std::size_t i = 0;
    for (std::int64_t b = 0; b < shape[0]; ++b) {
      for (std::int64_t n = 0; n < shape[1]; ++n) {
        for (std::int64_t t = 0; t < shape[2]; ++t) {
          const std::int64_t row = shape[2] == 1 ? 0 : rows.global(LocalPosition(t)).value();
          for (std::int64_t s = 0; s < shape[3]; ++s) entries[i++] = at(n, row, s);
        }
      }
    }
  }
  [[nodiscard]] ScoreTensors views(const Attention& attention, std::int64_t kv_length) const {
    const Extents query = attention.query_shape();
    const auto view = [](const auto& entries, DType dtype, const Extents& shape) {
      return shape.rank() == 0 ? ConstTensorView() : ConstTensorView(entries.data(), dtype, shape);
    };
    return broadcast_scores(view(bias, DType::float32, attention.bias_shape()),
                            view(mask, DType::boolean, attention.mask_shape()),
                            {query[0], query[2], query[1], kv_length});
  }
  std::vector<float> bias;
  std::vector<std::uint8_t> mask;
};

TEST_F(Face, BiasAndMask) {
  AttentionOptions options = causal(101);
  const std::int64_t length = options.shape.kv_length;
  for (const Extents& bias : {Extents{1, 4, length, length}, Extents{1, 1, 1, length}}) {
    options.bias = bias;
    options.dense_mask = Extents{1, 1, options.shape.query_length, length};
    Attention attention(context_, options);
    EXPECT_EQ(attention.bias_shape()[2], bias[2] == 1 ? 1 : attention.query_shape()[1]);
    EXPECT_EQ(attention.mask_shape(),
              (Extents{1, 1, attention.query_shape()[1], options.shape.kv_length}));
    Shards shards(attention, 3);
    Scores scores(attention);
    AttentionTensors tensors = shards.tensors(true);
    tensors.bias = scores.bias.data();
    tensors.mask = scores.mask.data();
    attention.run(tensors);
    expect_right(attention, options, shards, 3, true, scores.views(attention, length));
    // The entries may change from call to call.
    for (float& entry : scores.bias) entry = 1 - entry;
    attention.run(tensors);
    expect_right(attention, options, shards, 3, true, scores.views(attention, length));
  }
}

TEST_F(Face, BiasPolicies) {
  AttentionOptions options = causal(64);
  const std::int64_t length = options.shape.kv_length;
  options.mask.set_window(20, 20);
  options.bias = Extents{1, 4, length, length};
  options.dense_mask = Extents{1, 1, length, length};
  for (const BiasPolicy policy : {BiasPolicy::bias_wins, BiasPolicy::bias_disables_causal}) {
    options.bias_policy = policy;
    Attention attention(context_, options);
    Shards shards(attention, 3);
    const Scores scores(attention);
    AttentionTensors tensors = shards.tensors(true);
    tensors.bias = scores.bias.data();
    std::vector<std::uint8_t> unread(1);
    const bool wins = policy == BiasPolicy::bias_wins;
    tensors.mask = wins ? unread.data() : scores.mask.data();
    AttentionOptions left = options;
    const auto expect_left = [&](Mask mask) {
      if (wins) left.dense_mask.reset();
      left.mask = mask_beside_bias(policy, mask);
      attention.run(tensors);
      expect_right(attention, left, shards, 3, true, scores.views(attention, length));
    };
    expect_left(options.mask);
    Mask other;
    other.set_causal(true);
    other.set_kv_lengths({50, 64});
    attention.set_mask(other);
    expect_left(other);
  }
}

TEST_F(Face, InitBiasIsCalledOnlyWhereNothingElseIsGiven) {
  AttentionOptions options = causal(65);
  const std::int64_t length = options.shape.kv_length;
  int calls = 0;
  const Extents shape{1, 4, length, length};
  options.init_bias =
      InitBias{shape, [&](const TensorView& part, std::span<const PositionRanges> index) {
                 ++calls;
                 ASSERT_EQ(part.size(2), index[2].size());
                 std::vector<float> entries(static_cast<std::size_t>(part.elements()));
                 Scores::fill(entries, part.shape(), index[2], Scores::bias_at);
                 std::copy(entries.begin(), entries.end(), part.as<float>());
               }};
  const auto runs = [&](bool with_bias, bool with_mask) {
    Attention attention(context_, options);
    Shards shards(attention, 3);
    Scores scores(attention);
    AttentionTensors tensors = shards.tensors(true);
    if (with_bias) tensors.bias = scores.bias.data();
    if (with_mask) tensors.mask = scores.mask.data();
    for (int i = 0; i < 2; ++i) attention.run(tensors);
    AttentionOptions meant = options;
    if (calls > 0) {
      meant.bias = shape;
      meant.mask = mask_beside_bias(options.bias_policy, options.mask);
    }
    expect_right(attention, meant, shards, 3, true, scores.views(attention, length));
    if (calls == 0) return;
    tensors.bias = scores.bias.data();
    EXPECT_THROW(attention.run(tensors), LibraryError);
  };
  const Mask causal_mask = options.mask;
  options.mask.set_kv_lengths({60, 65});
  runs(false, false);  // there is a mask
  options.mask = causal_mask;
  options.mask.set_segments(2, std::vector<std::int32_t>(130), std::vector<std::int32_t>(130));
  runs(false, false);
  options.mask = {};
  options.mask.set_block_mask(BlockMask({1, 1, 1, 1}, {128, 128}, std::vector<std::uint8_t>{1}));
  runs(false, false);
  options.dense_mask = Extents{1, 1, length, length};
  options.mask = {};
  runs(false, true);
  options.dense_mask.reset();
  options.bias = shape;
  runs(true, false);
  EXPECT_EQ(calls, 0);
  options.bias.reset();
  runs(false, false);
  EXPECT_EQ(calls, 1);
  // Beside causal and a window too, which the policy may leave out.
  options.mask = causal_mask;
  options.mask.set_window(30, 30);
  runs(false, false);
  EXPECT_EQ(calls, 2);
  options.bias_policy = BiasPolicy::bias_disables_causal;
  runs(false, false);
  EXPECT_EQ(calls, 3);
  options.init_bias->fill = nullptr;
  EXPECT_THROW(Attention(context_, options), UserError);
}

TEST_F(Face, BiasAndMaskMustBeThoseOfTheProblem) {
  AttentionOptions options = causal(64);
  const std::int64_t length = options.shape.kv_length;
  const auto error = [&](bool bias, bool mask) {
    Attention attention(context_, options);
    Shards shards(attention, 3);
    std::vector<float> some(static_cast<std::size_t>(4 * length * length));
    AttentionTensors tensors = shards.tensors(true);
    if (bias) tensors.bias = some.data();
    if (mask) tensors.mask = some.data();
    return test::message_of<UserError>([&] { attention.run(tensors); });
  };
  EXPECT_THAT(error(true, false), AllOf(HasSubstr("bias: got a tensor"), HasSubstr("none")));
  EXPECT_THAT(error(false, true), AllOf(HasSubstr("mask: got a tensor"), HasSubstr("none")));
  options.bias = Extents{1, 4, length, length};
  options.dense_mask = Extents{1, 1, length, length};
  EXPECT_THAT(error(false, true), HasSubstr("bias: got a null pointer"));
  EXPECT_THAT(error(true, false), HasSubstr("mask: got a null pointer"));
  EXPECT_EQ(error(true, true), "nothing thrown");
  options.bias = Extents{1, 3, length, length};
  EXPECT_THROW(Attention(context_, options), UserError);
}

}  // namespace
}  // namespace annulus
