// The public interface on CPU ranks: what users get who give as few options as possible.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/core/error.hpp>
#include <annulus/ring/attention_weights.hpp>

#include "tests/ring/face/face_cases.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(Face, SayingLittleIsEnough) {
  EXPECT_EQ(context_.size(), test::session().size());
  EXPECT_EQ(context_.mesh().shape().axes().front().size, context_.size());
  const AttentionOptions options = causal(101);
  Attention attention(context_, options);
  for (const bool with_lse : {true, false}) {
    Shards shards(attention, 3);
    attention.run(shards.tensors(with_lse));
    expect_right(attention, options, shards, 3, with_lse);
    if (!with_lse) {
      EXPECT_TRUE(std::isnan(shards.lse.front()));
    }
  }
}

TEST_F(Face, Modifiers) {
  AttentionOptions options = causal(101);
  options.dropout.emplace(0.3, 8);
  options.sinks = Sinks({4, 2}, {0, 1, 2, 3, -1, -2, 5, 0.5F});
  Attention attention(context_, options);
  expect_right_run(attention, options, 3);
}

TEST_F(Face, MetadataSayWhatAndWhere) {
  const AttentionMetadata metadata = AttentionMetadata::resolve(
      {.soft_cap = 4.0, .backend = Backend::cpu},
      parse_metadata(R"({"softmax_scale": 0.5, "soft_cap": 9, "dropout_prob": 0.25,
                         "dropout_seed": 8, "sequence_axis_name": "ctx"})",
                     "m.json")
          .fields);
  ContextOptions context_options = annulus::context_options(metadata);
  context_options.threads = 1;
  Context context(world(), context_options);
  EXPECT_EQ(context.mesh().shape().axes().front().name, "ctx");
  EXPECT_TRUE(context.place().is_host());
  AttentionOptions expected = causal(101);
  const AttentionOptions options = attention_options(metadata, expected.shape, expected.mask);
  EXPECT_TRUE(options.normalize_output);
  EXPECT_FALSE(attention_options(metadata.replace({.normalize_output = false}), expected.shape,
                                 expected.mask)
                   .normalize_output);
  expected.scale = 0.5;
  expected.soft_cap = 4.0;
  expected.dropout.emplace(0.25, 8);
  Attention attention(context, options);
  EXPECT_EQ(attention.plan_input().operands.key.shards(1), context.size());
  expect_right_run(attention, expected, 3);
}

TEST_F(Face, RulesOfTheModeDecideTheSpecs) {
  AttentionOptions options = causal(64);
  options.rules.set({SemanticAxis::query_length, AttentionMode::insert, {}});
  options.rules.set({SemanticAxis::kv_length, AttentionMode::insert, {}});
  const auto rows = [&](std::optional<AttentionMode> mode) {
    options.mode = mode;
    return Attention(context_, options).query_shape()[1];
  };
  EXPECT_EQ(rows(AttentionMode::insert), 64);
  EXPECT_EQ(rows(AttentionMode::train), 64 / context_.size());
  EXPECT_EQ(rows({}), 64 / context_.size());
  options.rules.set({SemanticAxis::head, {}, {"tp"}});
  EXPECT_THAT(test::message_of<UserError>([&] { Attention(context_, options); }),
              HasSubstr("'tp'"));
}

TEST_F(Face, StrategiesChooseTheSchedule) {
  AttentionOptions options = causal(64);
  options.implementation = "ring";
  {
    Attention attention(context_, options);
    EXPECT_EQ(attention.schedule().schedule, ring::Schedule::ring);
    expect_right_run(attention, options, 3);
  }
  options.schedule = "allgather";
  EXPECT_THAT(test::message_of<UserError>([&] { Attention(context_, options); }),
              HasSubstr("schedule: got allgather"));
  options.schedule = "auto";
  options.implementation = "autoregressive_decodeattn";
  EXPECT_THAT(test::message_of<UserError>([&] { Attention(context_, options); }),
              HasSubstr("T = 64"));
}

// Checks that the weights times the values of all ranks are the output.
void expect_weights(const Attention& attention, const AttentionOptions& options,
                    const Shards& shards, const float* weights) {
  const AttentionShape& s = options.shape;
  std::vector<float> value;
  Shards::fill(value, {s.batch, s.kv_length, s.kv_heads, s.value_dim},
               PositionRanges::all(s.kv_length), 5);
  const Extents shape = attention.weights_shape();
  ASSERT_EQ(shape[3], s.kv_length);
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t n = 0; n < shape[1]; ++n) {
      for (std::int64_t t = 0; t < shape[2]; ++t) {
        for (std::int64_t d = 0; d < s.value_dim; ++d) {
          double sum = 0;
          for (std::int64_t j = 0; j < s.kv_length; ++j) {
            sum += double{weights[((b * shape[1] + n) * shape[2] + t) * s.kv_length + j]} *
                   value[static_cast<std::size_t>(
                       ((b * s.kv_length + j) * s.kv_heads + n / 2) * s.value_dim + d)];
          }
          const auto index = ((b * shape[2] + t) * shape[1] + n) * s.value_dim + d;
          ASSERT_NEAR(sum, shards.output[static_cast<std::size_t>(index)], 2e-6);
        }
      }
    }
  }
}

TEST_F(Face, VanillaGivesWeightsOfEveryRanksRows) {
  AttentionOptions options = causal(29);
  options.weights = true;
  options.dropout.emplace(0.3, 8);
  options.sinks = Sinks({1}, {0.5F});
  options.bias = Extents{1, 1, 1, 29};
  std::vector<float> bias(29);
  for (std::size_t j = 0; j < bias.size(); ++j) bias[j] = std::cos(static_cast<float>(j));
  for (const char* implementation : {"auto", "vanilla"}) {
    options.implementation = implementation;
    Attention attention(context_, options);
    Shards shards(attention, 3);
    std::vector<float> weights(static_cast<std::size_t>(attention.weights_shape().product()), NAN);
    EXPECT_EQ(attention.weights_dtype(), DType::float32);
    AttentionTensors tensors = shards.tensors(true);
    tensors.weights = weights.data();
    tensors.bias = bias.data();
    attention.run(tensors);
    expect_right(attention, options, shards, 3, true,
                 broadcast_scores({bias.data(), DType::float32, *options.bias}, {},
                                  attention.weights_shape()));
    expect_weights(attention, options, shards, weights.data());
  }
}

TEST_F(Face, OutputsOfTheirOwn) {
  AttentionOptions options = causal(29);
  for (const bool weights : {false, true}) {
    options.weights = weights;
    Attention attention(context_, options);
    Shards shards(attention, 3);
    const AttentionOutput output = attention.compute(
        {shards.query.data(), shards.key.data(), shards.value.data()}, /*with_lse=*/weights);
    EXPECT_EQ(output.lse.has_value(), weights);
    ASSERT_EQ(output.weights.has_value(), weights);
    std::copy_n(output.outputs.view().as<float>(), shards.output.size(), shards.output.begin());
    if (weights) {
      std::copy_n(output.lse->view().as<float>(), shards.lse.size(), shards.lse.begin());
      expect_weights(attention, options, shards, output.weights->view().as<float>());
    }
    expect_right(attention, options, shards, 3, weights);
  }
}

// The caller's tensors and compute()'s, under schedules with and without hops.
TEST_F(Face, UnnormalisedOutputs) {
  AttentionOptions options = causal(29);
  options.sinks = Sinks({1}, {0.5F});
  options.normalize_output = false;
  for (const char* schedule : {"ring", "allgather"}) {
    options.schedule = schedule;
    Attention attention(context_, options);
    Shards shards(attention, 3);
    std::vector<float> maximum(shards.lse.size(), NAN);
    std::vector<float> sum(shards.lse.size(), NAN);
    AttentionTensors tensors = shards.tensors(false);
    tensors.maximum = maximum.data();
    tensors.sum = sum.data();
    attention.run(tensors);
    const AttentionOutput output =
        attention.compute({shards.query.data(), shards.key.data(), shards.value.data()});
    EXPECT_FALSE(output.lse);
    EXPECT_TRUE(std::equal(maximum.begin(), maximum.end(), output.maximum->view().as<float>()));
    EXPECT_TRUE(std::equal(sum.begin(), sum.end(), output.sum->view().as<float>()));
    EXPECT_TRUE(
        std::equal(shards.output.begin(), shards.output.end(), output.outputs.view().as<float>()));
    // Divided by its sum, it is the usual output.
    const Extents shape = attention.output_shape();
    for (std::size_t row = 0; row < sum.size(); ++row) {
      const auto rows = static_cast<std::size_t>(shape[1]);
      const auto heads = static_cast<std::size_t>(shape[2]);
      const std::size_t t = row % rows;
      const std::size_t n = row / rows % heads;
      const std::size_t b = row / rows / heads;
      const auto dim = static_cast<std::size_t>(shape[3]);
      for (std::size_t d = 0; d < dim; ++d) {
        shards.output[((b * rows + t) * heads + n) * dim + d] /= sum[row];
      }
      EXPECT_GE(maximum[row], 0.5F);
      EXPECT_GE(sum[row], 1.0F);
      shards.lse[row] = maximum[row] + std::log(sum[row]);
    }
    expect_right(attention, options, shards, 3, true);
  }
}

TEST_F(Face, MaximumAndSumAreForThoseWhoAskedForThem) {
  AttentionOptions options = causal(29);
  float memory = 0;
  const auto message = [&](const auto& change) {
    Attention attention(context_, options);
    Shards shards(attention, 3);
    AttentionTensors tensors = shards.tensors(false);
    if (!options.normalize_output) tensors.maximum = tensors.sum = &memory;
    // One rank is enough.
    if (context_.rank() == context_.size() - 1) change(tensors);
    return test::message_of<UserError>([&] { attention.run(tensors); });
  };
  EXPECT_THAT(message([&](auto& t) { t.maximum = &memory; }),
              HasSubstr("maximum: got memory, expected none: the options do not ask for an "
                        "unnormalised output"));
  EXPECT_THAT(message([&](auto& t) { t.sum = &memory; }), HasSubstr("sum: got memory"));
  options.normalize_output = false;
  EXPECT_THAT(message([&](auto& t) { t.maximum = nullptr; }),
              HasSubstr("maximum: got a null pointer"));
  EXPECT_THAT(message([&](auto& t) { t.sum = nullptr; }), HasSubstr("sum: got a null pointer"));
  EXPECT_THAT(message([&](auto& t) { t.lse = &memory; }),
              HasSubstr("lse: got memory, expected none with normalize_output = false: the LSE is "
                        "maximum + log(sum)"));
  options.weights = true;
  EXPECT_THAT(test::message_of<UserError>([&] { Attention(context_, options); }),
              HasSubstr("normalize_output: got false"));
}

TEST_F(Face, WeightsAreForThoseWhoAskedForThem) {
  AttentionOptions options = causal(29);
  const auto message = [&](void* weights) {
    Attention attention(context_, options);
    Shards shards(attention, 3);
    AttentionTensors tensors = shards.tensors(true);
    tensors.weights = weights;
    return test::message_of<UserError>([&] { attention.run(tensors); });
  };
  float memory = 0;
  EXPECT_THAT(message(&memory), HasSubstr("weights: got memory"));
  options.weights = true;
  EXPECT_THAT(message(nullptr), HasSubstr("weights: got a null pointer"));
  options.implementation = "native";
  EXPECT_THAT(test::message_of<UserError>([&] { Attention(context_, options); }),
              HasSubstr("a request for attention weights"));
  options.implementation = "vanilla";
  options.shape = {1, 8192, 8192, 32 * context_.size(), 2, 2, 2};  // 8 GiB per rank
  EXPECT_THAT(test::message_of<UserError>([&] { Attention(context_, options); }),
              HasSubstr("more than 4096 MiB"));
}

TEST_F(Face, TheMemoryOfWeightsIncludesTheKeysThatARankGathers) {
  AttentionProblem problem;
  problem.shape = {1, 8, std::int64_t{1} << 20U, 1, 1, 1000, 1};
  problem.weights = true;
  const auto refusal = [&] {
    return test::message_of<UnsupportedError>([&] {
      ring::check_weights_fit(problem, ring::shard_operands(problem, MeshShape({{"sp", 8}}),
                                                            {PartitionSpec::parse("-,sp"),
                                                             PartitionSpec::parse("-,sp")}));
    });
  };
  EXPECT_EQ(refusal(), "nothing thrown");
  problem.shape.head_dim = 1024;
  EXPECT_THAT(refusal(), AllOf(HasSubstr("keys"), HasSubstr("1048576"), HasSubstr("4096 MiB")));
}

TEST_F(Face, CausalSequencesAreSharedOutEvenlyByDefault) {
  const AttentionOptions options = causal(std::int64_t{64} * context_.size());
  Attention attention(context_, options);
  EXPECT_EQ(attention.query_positions().ranges().size(), context_.size() == 1 ? 1U : 2U);
  AttentionOptions full = options;
  full.mask = Mask();
  EXPECT_EQ(Attention(context_, full).query_positions().ranges().size(), 1U);
}

// For uneven documents; shards stay where they are when other documents are set.
TEST_F(Face, UnevenDocumentsAreBalancedByDefault) {
  AttentionOptions options = causal(std::int64_t{256} * context_.size());
  const auto length = static_cast<std::int32_t>(options.shape.kv_length);
  const auto packed = [&](std::int32_t cut) {
    std::vector<std::int32_t> ids;
    for (std::int64_t b = 0; b < options.shape.batch; ++b) {
      const auto row = segments_from_cu_seqlens(std::vector{0, cut, length}, length);
      ids.insert(ids.end(), row.begin(), row.end());
    }
    Mask mask;
    mask.set_causal(true);
    mask.set_segments(options.shape.batch, ids, ids);
    return mask;
  };
  options.mask = packed(length / 4 * 3);
  Attention attention(context_, options);
  const ring::ShardedOperands& operands = attention.plan_input().operands;
  EXPECT_EQ(operands.query.distribution(1).layout(),
            context_.size() == 1 ? LayoutKind::contiguous : LayoutKind::balanced);
  EXPECT_EQ(operands.query.distribution(1), operands.key.distribution(1));
  const PositionRanges positions = attention.query_positions();
  for (const std::int32_t cut : {length / 4 * 3, length / 8}) {
    options.mask = packed(cut);
    attention.set_mask(options.mask);
    EXPECT_EQ(attention.query_positions(), positions);
    expect_right_run(attention, options, cut);
  }
}

// 16 layers that take turns on one context.
TEST_F(Face, ManyObjectsShareAContextInTurn) {
  std::vector<std::unique_ptr<Attention>> layers;
  std::vector<AttentionOptions> options;
  for (int i = 0; i < 16; ++i) {
    options.push_back(causal(37 + i));
    if (i % 3 == 0) options.back().schedule = context_.size() == 1 ? "local" : "allgather";
    layers.push_back(std::make_unique<Attention>(context_, options.back()));
  }
  for (int round = 0; round < 2; ++round) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      expect_right_run(*layers[i], options[i], round);
    }
  }
}

TEST_F(Face, ManyObjectsOfOneShapeTakeTheMemoryOfOne) {
  AttentionOptions options = causal(61);
  if (context_.size() > 1) options.schedule = "ring";
  const auto in_use = [&] { return context_.device().memory().statistics().in_use; };
  const std::size_t before = in_use();
  std::vector<std::unique_ptr<Attention>> layers;
  std::size_t of_one = 0;
  for (int i = 0; i < 64; ++i) {
    layers.push_back(std::make_unique<Attention>(context_, options));
    if (i == 0) of_one = in_use() - before;
  }
  EXPECT_GT(of_one, 0U);
  EXPECT_EQ(in_use() - before, of_one);
  for (std::size_t i = 0; i < layers.size(); i += 21) {
    expect_right_run(*layers[i], options, static_cast<int>(i));
  }
  layers.clear();
  EXPECT_EQ(in_use(), before);
}

// The schedule that is kept is not the one that would be chosen, and nothing is predicted.
TEST_F(Face, AScheduleIsKeptFromMaskToMask) {
  AttentionOptions options = causal(std::int64_t{64} * context_.size());
  Attention attention(context_, options);
  attention.prepare_backward();
  const auto forward = [&] { return attention.schedule().schedule; };
  const auto backward = [&] { return attention.backward_pass()->schedule().schedule; };
  const std::pair first(forward(), backward());
  options.mask = {};
  options.mask.set_window(3, 3);
  attention.set_mask(options.mask);
  attention.prepare_backward();
  const std::pair chosen(forward(), backward());
  if (context_.size() > 2) {
    EXPECT_NE(first, chosen) << "nothing is kept that would not be chosen";
  }
  for (const std::int64_t window : {3, 5}) {
    options.mask.set_window(window, window);
    attention.set_mask(causal(1).mask);
    attention.prepare_backward();
    EXPECT_EQ(std::pair(forward(), backward()), first);
    attention.set_mask(options.mask, ring::NextSchedule::kept);
    attention.prepare_backward();
    EXPECT_EQ(std::pair(forward(), backward()), first);
    EXPECT_EQ(attention.schedule().seconds, 0);
    EXPECT_TRUE(attention.schedule().passed_over.empty());
    expect_right_run(attention, options, 3);
  }
}

TEST_F(Face, RanksAgreeOnWhetherAScheduleIsKept) {
  if (test::session().size() == 1) GTEST_SKIP() << "needs 2 ranks";
  AttentionOptions options = causal(61);
  Attention attention(context_, options);
  options.mask.set_window(7, 0);
  const auto next = context_.rank() == 1 ? ring::NextSchedule::kept : ring::NextSchedule::chosen;
  EXPECT_THAT(test::message_of<ArgumentError>([&] { attention.set_mask(options.mask, next); }),
              HasSubstr("attention on rank 1: got schedule kept: "));
}

// One object serves batches of other lengths and other documents, one after the other.
TEST_F(Face, MasksAreReplacedFromCallToCall) {
  AttentionOptions options = causal(61);
  Attention attention(context_, options);
  const auto expect_right_with = [&](const Mask& mask, int seed) {
    options.mask = mask;
    attention.set_mask(mask);
    expect_right_run(attention, options, seed);
  };
  Mask lengths;
  lengths.set_causal(true);
  for (const std::vector<std::int32_t>& of_batch :
       {std::vector{61, 17}, std::vector{5, 60}, std::vector{1, 1}}) {
    lengths.set_kv_lengths(of_batch);
    expect_right_with(lengths, of_batch[0]);
  }
  for (const std::vector<std::int32_t>& prefix_sum :
       {std::vector{0, 9, 30, 61}, std::vector{0, 60, 61}}) {
    const std::vector<std::int32_t> ids = segments_from_cu_seqlens(prefix_sum, 61);
    std::vector<std::int32_t> of_both = ids;
    of_both.insert(of_both.end(), ids.begin(), ids.end());
    Mask packed;
    packed.set_causal(true);
    packed.set_segments(2, of_both, of_both);
    expect_right_with(packed, prefix_sum[1]);
  }
  expect_right_with({}, 2);
}

TEST_F(Face, AMaskThatDoesNotFitChangesNothing) {
  const AttentionOptions options = causal(40);
  Attention attention(context_, options);
  Mask lengths;
  lengths.set_kv_lengths({1, 2, 3});
  EXPECT_THROW(attention.set_mask(lengths), UserError);
  Mask differing;
  differing.set_window(context_.rank() == 0 ? 3 : 5, -1);
  if (context_.size() > 1) {
    EXPECT_THROW(attention.set_mask(differing), UserError);
  }
  expect_right_run(attention, options, 4);
}

// Without the fixture, whose context has MPI.
TEST(FaceAlone, OneRankNeedsNoMpi) {
  Context context(on_host());
  EXPECT_EQ(context.size(), 1);
  const AttentionOptions options = causal(33);
  Attention attention(context, options);
  expect_right_run(attention, options, 9);
}

}  // namespace
}  // namespace annulus
