// Lengths, offsets and seeds that change from call to call, on CPU ranks, against the oracle.
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tests/ring/face/face_cases.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using CallValues = Face;

using ::testing::AllOf;
using ::testing::HasSubstr;

// Calls one object with all values in turn, forward and, where asked, backward.
void expect_right_calls(Context& context, const AttentionOptions& options,
                        const std::vector<Values>& calls, bool backward = false) {
  Attention attention(context, options);
  const ring::RankPlan* const plan = &attention.rank_plan();
  int seed = 3;
  for (const Values& values : calls) {
    SCOPED_TRACE("call " + std::to_string(seed - 3));
    const AttentionOptions called = values.applied(options);
    BackwardShards shards(attention, seed);
    attention.run(shards.tensors(true, values.views()));
    expect_right(attention, called, shards, seed, true);
    if (backward) {
      BackwardTensors gradients = shards.backward();
      gradients.call_values = values.views();
      std::vector<float> sinks;
      if (options.sinks) {
        sinks.resize(static_cast<std::size_t>(attention.sinks_shape().product()), NAN);
        gradients.grad_sinks = sinks.data();
      }
      attention.backward(gradients);
      expect_right_gradient(attention, called, seed, shards.grad_query, shards.grad_key,
                            shards.grad_value, sinks);
    }
    ++seed;
  }
  EXPECT_EQ(&attention.rank_plan(), plan) << "something was planned again";
}

std::vector<std::string> schedules_of(int ranks) {
  if (ranks == 1) return {"local"};
  return {"ring", "double_ring", "allgather", "ulysses", "hybrid", "pass_q"};
}

// Under every schedule and implementation; gradients where the schedule has a backward pass.
void expect_right_everywhere(AttentionOptions options, const std::vector<Values>& calls) {
  Context context(world(), on_host());
  for (const std::string& schedule : schedules_of(context.size())) {
    SCOPED_TRACE(schedule);
    options.schedule = schedule;
    options.inner_size = schedule == "double_ring" && context.size() % 2 == 0 ? 2 : 0;
    const bool backward = schedule == "local" || schedule == "ring" || schedule == "allgather" ||
                          schedule == "ulysses";
    for (const char* const implementation : {"native", "vanilla"}) {
      SCOPED_TRACE(implementation);
      options.implementation = implementation;
      expect_right_calls(context, options, calls, backward);
    }
  }
}

TEST_F(CallValues, LengthsUpToThoseOfThePlan) {
  AttentionOptions options = causal(37);
  options.call_arguments.lengths = true;
  options.mask.set_kv_lengths({37, 30});
  expect_right_everywhere(options, {{},
                                    {.kv_lengths = {9, 30}},
                                    {.kv_lengths = {37, 0}},
                                    {.query_lengths = {20, 37}, .kv_lengths = {11}},
                                    {}});
}

TEST_F(CallValues, LengthsWhereThePlanHasNone) {
  AttentionOptions options = causal(37);
  options.mask.set_causal(false);  // every block is visible as a whole
  options.call_arguments.lengths = true;
  expect_right_everywhere(options, {{},
                                    {.kv_lengths = {1, 36}},
                                    {.query_lengths = {5, 0}},
                                    {.query_lengths = {37}, .kv_lengths = {37}}});
}

// Offsets may show what the planned ones hide, and the other way round.
TEST_F(CallValues, OffsetsOfAnySize) {
  AttentionOptions options = causal(37);
  options.mask.set_offset(-3);
  options.call_arguments.offsets = true;
  const std::vector<Values> calls{
      {}, {.offsets = {36}}, {.offsets = {-36, 12}}, {.offsets = {2147483647, -2147483647}}, {}};
  expect_right_everywhere(options, calls);
  options.mask.set_window(6, 2);
  options.mask.set_sink_tokens(2);
  options.mask.set_prefixes({0, 3});
  expect_right_everywhere(options, calls);
  options.mask = {};
  options.mask.set_chunk(8);
  expect_right_everywhere(options, {{}, {.offsets = {3, 21}}});
}

TEST_F(CallValues, SeedsOfDropout) {
  AttentionOptions options = causal(37);
  options.dropout.emplace(0.3, 8);
  options.call_arguments.dropout_seed = true;
  expect_right_everywhere(options, {{}, {.seed = 9}, {.seed = 0xfeedfacecafebeefU}, {}});
}

// Sinks of the problem hold again where a call has none.
TEST_F(CallValues, Sinks) {
  AttentionOptions options = causal(37);
  options.sinks = Sinks({4, 1}, {0, 1, -1, 0.5F});
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  expect_right_everywhere(options,
                          {{}, {.sinks = {3, -2, 0, 1}}, {.sinks = {kNone, kNone, 0.25F, 7}}, {}});
}

TEST_F(CallValues, SinksThatTheHeadsShare) {
  AttentionOptions options = causal(37);
  options.sinks = Sinks({3}, {0, 1, -1});
  Attention attention(context_, options);
  Shards shards(attention, 3);
  AttentionTensors tensors = shards.tensors(true);
  const std::vector<float> sinks{2, 0.5F, -3};
  tensors.call_values.sinks = {sinks.data(), DType::float32, {3}};
  attention.run(tensors);
  options.sinks = Sinks({3}, sinks);
  expect_right(attention, options, shards, 3, true);
}

TEST_F(CallValues, AllTogetherBesideOtherParts) {
  AttentionOptions options = causal(37);
  options.dropout.emplace(0.3, 8);
  options.soft_cap = 2.0;
  options.sinks = Sinks({4, 1}, {0, 1, -1, 0.5F});
  options.call_arguments = {true, true, true};
  Numbers ids = segments_from_cu_seqlens(Numbers{0, 15, 37}, 37);
  ids.insert(ids.end(), ids.begin(), ids.end());
  options.mask.set_segments(2, ids, ids);
  expect_right_everywhere(
      options, {{.query_lengths = {30, 37}, .kv_lengths = {20, 33}, .offsets = {2, -2}, .seed = 1},
                {.kv_lengths = {37}, .offsets = {5}, .seed = 2}});
}

// A rank passes the values of its own batches.
TEST_F(CallValues, BatchesOfTheRank) {
  ContextOptions context_options = on_host();
  if (test::session().size() % 2 == 0) context_options.mesh = "dp=2,sp=-1";
  Context context(world(), context_options);
  AttentionOptions options = causal(37);
  options.call_arguments = {true, true, false};
  Attention attention(context, options);
  const auto batches = attention.query_shape()[0];
  const bool sharded = context.size() % 2 == 0;
  EXPECT_EQ(batches, sharded ? 1 : 2);
  const std::size_t first = sharded && context.rank() >= context.size() / 2 ? 1 : 0;
  const auto mine = [&](const Numbers& all) {
    return Numbers(all.begin() + static_cast<std::ptrdiff_t>(first),
                   all.begin() + static_cast<std::ptrdiff_t>(first + batches));
  };
  for (const Numbers& lengths : {Numbers{9, 33}, Numbers{37, 2}}) {
    const Values values{.kv_lengths = mine(lengths), .offsets = mine({4, -7})};
    Shards shards(attention, lengths[0]);
    attention.run(shards.tensors(true, values.views()));
    AttentionOptions called = options;
    called.shape.batch = batches;
    expect_right(attention, values.applied(called), shards, lengths[0], true);
  }
}

// Only one rank does it, so that others would be missing if it communicated.
TEST_F(CallValues, SetMaskOfOtherValuesPlansNothingAndAsksNobody) {
  AttentionOptions options = causal(37);
  options.call_arguments = {true, true, false};
  options.mask.set_kv_lengths({37, 30});
  Attention attention(context_, options);
  const ring::RankPlan* const plan = &attention.rank_plan();
  const auto expect_right_now = [&](int seed) {
    BackwardShards shards(attention, seed);
    attention.run(shards.tensors(true));
    expect_right(attention, options, shards, seed, true);
    attention.backward(shards.backward());
    expect_right_gradient(attention, options, seed, shards.grad_query, shards.grad_key,
                          shards.grad_value);
  };
  if (context_.rank() == context_.size() - 1) {
    Mask mask = options.mask;
    mask.set_offset(9);
    attention.set_mask(mask);  // and again below, with the others
  }
  for (const Numbers& lengths : {Numbers{5, 30}, Numbers{37, 1}}) {
    options.mask.set_kv_lengths(lengths);
    options.mask.set_offsets({lengths[1], -2});
    attention.set_mask(options.mask);
    expect_right_now(lengths[0]);
  }
  EXPECT_EQ(&attention.rank_plan(), plan);
  // A call's own values come first, for this call.
  {
    const Values values{.kv_lengths = {8, 9}};
    Shards shards(attention, 4);
    attention.run(shards.tensors(true, values.views()));
    expect_right(attention, values.applied(options), shards, 4, true);
  }
  expect_right_now(5);
  // Beyond the lengths that were planned for, and another mask: there is a new plan.
  options.mask.set_kv_lengths({37, 37});
  attention.set_mask(options.mask);
  expect_right_now(6);
  options.mask.set_window(5, 5);
  attention.set_mask(options.mask);
  expect_right_now(7);
}

TEST_F(CallValues, WeightsFollowThem) {
  AttentionOptions options = causal(11);
  options.implementation = "vanilla";
  options.weights = true;
  options.sinks = Sinks({4, 1}, std::vector<float>(4));
  options.call_arguments.lengths = true;
  Attention attention(context_, options);
  Shards shards(attention, 3);
  std::vector<float> weights(static_cast<std::size_t>(attention.weights_shape().product()));
  AttentionTensors tensors = shards.tensors(true);
  tensors.weights = weights.data();
  const Numbers lengths{4, 7};
  const Values values{.kv_lengths = lengths, .sinks = {50, 0, 0, 0}};
  tensors.call_values = values.views();
  attention.run(tensors);
  const Extents shape = attention.weights_shape();
  const ConstTensorView view(weights.data(), DType::float32, shape);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t t = 0; t < shape[2]; ++t) {
      const std::int64_t row = attention.query_positions().global(LocalPosition(t)).value();
      for (std::int64_t s = 0; s < shape[3]; ++s) {
        const bool seen = s <= row && s < lengths[static_cast<std::size_t>(b)];
        EXPECT_EQ(view.at<float>({b, 1, t, s}) > 0, seen) << b << " " << t << " " << s;
        EXPECT_LT(view.at<float>({b, 0, t, s}), 1e-15F);  // the sink takes all
      }
    }
  }
}

TEST_F(CallValues, WrongOnesAreErrors) {
  AttentionOptions options = causal(37);
  options.mask.set_kv_lengths({37, 30});
  options.dropout.emplace(0.3, 8);
  options.call_arguments.lengths = true;
  const auto first_call = [&](const ring::CallValues& values) {
    Attention attention(context_, options);
    Shards shards(attention, 3);
    AttentionTensors tensors = shards.tensors(true);
    if (context_.rank() == context_.size() - 1) tensors.call_values = values;  // one is enough
    return test::message_of<UserError>([&] { attention.run(tensors); });
  };
  const auto of = [&](const Values& values) { return first_call(values.views()); };
  EXPECT_THAT(of({.kv_lengths = {37, 31}}),
              HasSubstr("kv_lengths: got 31 in batch 1, expected 0 to 30, as planned"));
  EXPECT_THAT(of({.query_lengths = {38, 1}}),
              HasSubstr("q_lengths: got 38 in batch 0, expected 0 to 37"));
  EXPECT_THAT(of({.query_lengths = {-1}}), HasSubstr("q_lengths: got -1 in batch 0"));
  EXPECT_THAT(of({.kv_lengths = {1, 2, 3}}),
              HasSubstr("kv_lengths: got shape [3], expected [1], or [2]"));
  EXPECT_THAT(of({.offsets = {1}}), HasSubstr("causal offset: got a value for this call, expected "
                                              "none: the problem's call arguments are lengths"));
  EXPECT_THAT(of({.seed = 1}), HasSubstr("dropout seed: got a value for this call"));
  EXPECT_THAT(
      of({.sinks = {1, 2, 3, 4}}),
      HasSubstr("sinks: got a value for this call, expected none: the problem has no sinks"));
  const std::vector<float> floats(2);
  EXPECT_THAT(first_call({.kv_lengths = {floats.data(), DType::float32, {2}}}),
              HasSubstr("kv_lengths: got float32, expected int32"));
  EXPECT_THAT(first_call({.kv_lengths = {nullptr, DType::int32, {2}}}),
              HasSubstr("kv_lengths: got a null pointer"));
  const Place gpu = Place::cuda(0);
  EXPECT_THAT(first_call({.kv_lengths = {floats.data(), DType::int32, {2}, gpu}}),
              HasSubstr("kv_lengths: got memory of cuda:0, expected host memory"));
  ring::CallValues on_gpu;
  const std::uint64_t seed = 3;
  on_gpu.device_dropout_seed = &seed;
  options.call_arguments.dropout_seed = true;
  EXPECT_THAT(first_call(on_gpu), HasSubstr("expected a number, as the CPU computes"));
  options.sinks = Sinks({4, 2}, std::vector<float>(8));
  EXPECT_THAT(of({.sinks = {1, 2, 3, 4}}), HasSubstr("sinks: got shape [4, 1], expected [4, 2]"));
  ring::CallValues far;
  far.sinks = {floats.data(), DType::float32, {4, 2}, gpu};
  EXPECT_THAT(first_call(far), HasSubstr("sinks: got memory of cuda:0, expected that of "));
  far.sinks = {floats.data(), DType::bfloat16, {4, 2}};
  EXPECT_THAT(first_call(far), HasSubstr("sinks: got bfloat16, expected float32"));
  options.sinks.reset();
  // Later, each rank is alone.
  Attention attention(context_, options);
  Shards shards(attention, 3);
  AttentionTensors tensors = shards.tensors(true);
  attention.run(tensors);
  const Numbers lengths{37, 31};
  tensors.call_values.kv_lengths = Values::view(lengths);
  EXPECT_THAT(test::message_of<LibraryError>([&] { attention.run(tensors); }),
              AllOf(HasSubstr("rank " + std::to_string(context_.rank())),
                    HasSubstr("kv_lengths: got 31 in batch 1")));
}

TEST_F(CallValues, ProblemsThatCannotHaveThemAreRefused) {
  test::add_native(context_.registry(), "fixed").declaration().features = FeatureSet::all();
  const auto message = [&](const std::function<void(AttentionOptions&)>& change) {
    AttentionOptions options = causal(37);
    change(options);
    return test::message_of<UserError>([&] { Attention(context_, options); });
  };
  EXPECT_THAT(message([](AttentionOptions& o) { o.call_arguments.dropout_seed = true; }),
              HasSubstr("call arguments: got dropout seed, expected no dropout seed"));
  EXPECT_THAT(message([](AttentionOptions& o) {
                o.mask.set_packings(2, {0, 37}, {0, 37}, DocumentAlignment::top_left);
                o.call_arguments.offsets = true;
              }),
              HasSubstr("call arguments: got offsets, expected no offsets with two packings"));
  EXPECT_THAT(message([](AttentionOptions& o) {
                o.bias = Extents{1, 1, 37, 37};
                o.bias_policy = BiasPolicy::bias_wins;
                o.call_arguments.lengths = true;
              }),
              HasSubstr("no lengths or offsets under a bias policy other than combine"));
  EXPECT_THAT(message([](AttentionOptions& o) {
                o.implementation = "fixed";
                o.dropout.emplace(0.3, 8);
                o.call_arguments = {true, true, true};
              }),
              HasSubstr("does not honour lengths as call arguments, offsets as call arguments, a "
                        "dropout seed as call argument"));
}

}  // namespace
}  // namespace annulus
