// The backward pass of the public interface on CPU ranks, against the oracle's gradients.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/attention/oracle_gradients.hpp>
#include <annulus/core/error.hpp>
#include <annulus/ring/sharded_attention.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tests/ring/face/face_cases.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using BackwardFace = Face;

using ::testing::HasSubstr;

constexpr float kBefore = 0.25F;  // what gradients are added to

void expect_gradients(const Attention& attention, const AttentionOptions& options,
                      const BackwardShards& shards, const OracleGradients& truth,
                      float before = 0) {
  expect_gradients(attention, options, shards.grad_query, shards.grad_key, shards.grad_value, truth,
                   before);
}

void expect_gradients(const Attention& attention, const AttentionOptions& options,
                      const BackwardShards& shards, int seed, bool with_grad_lse = false,
                      float before = 0) {
  expect_gradients(attention, options, shards, true_gradients(options, seed, with_grad_lse),
                   before);
}

void expect_right_gradients(Attention& attention, const AttentionOptions& options, int seed) {
  BackwardShards shards(attention, seed);
  attention.run(shards.tensors(true));
  attention.backward(shards.backward());
  expect_gradients(attention, options, shards, seed);
}

TEST_F(BackwardFace, GradientsAreThoseOfTheOracle) {
  AttentionOptions options = causal(67);
  for (const char* schedule :
       {"auto", "ring", "double_ring", "allgather", "ulysses", "hybrid", "pass_q"}) {
    SCOPED_TRACE(schedule);
    options.schedule = schedule;
    const bool rings = std::string("double_ring") == schedule && context_.size() % 2 == 0;
    options.inner_size = rings ? 2 : 0;
    Attention attention(context_, options);
    EXPECT_EQ(attention.backward_pass(), nullptr);
    expect_right_gradients(attention, options, 3);
    ASSERT_NE(attention.backward_pass(), nullptr);
    EXPECT_EQ(attention.backward_pass()->implementations_of_ranks(), "native");
    if (std::string("auto") != schedule) {
      EXPECT_EQ(ring::name_of(attention.backward_pass()->schedule().schedule), schedule);
    }
    if (rings) {
      EXPECT_EQ(attention.backward_pass()->schedule().inner_size, 2);
    }
    // The kernels alone spoil the gradients of a call, and nothing that a later call computes.
    if (context_.rank() == 0) {
      BackwardShards spoilt(attention, 3);
      attention.backward_pass()->run_kernels(attention.backward_views(spoilt.backward()));
    }
    expect_right_gradients(attention, options, 4);
  }
}

// Kernels that plans assume to be ten times as fast as native ones.
TEST_F(BackwardFace, KernelsWhoseBitsVaryAreForThoseWhoDoNotAskForTheSameBits) {
  test::add_native(context_.registry(), "unordered", 10).declaration().backward->repeats_bits =
      false;
  AttentionOptions options = causal(67);
  const auto computed_by = [&] {
    Attention attention(context_, options);
    expect_right_gradients(attention, options, 3);
    return attention.backward_pass()->implementations_of_ranks();
  };
  EXPECT_EQ(computed_by(), "native");
  options.reproducible = Reproducible::no;
  EXPECT_EQ(computed_by(), "unordered");
  options.reproducible = Reproducible::run;
  EXPECT_EQ(computed_by(), "native");
  options.backward.implementation = "unordered";
  Attention attention(context_, options);
  EXPECT_THAT(test::message_of<UserError>([&] { attention.prepare_backward(); }),
              HasSubstr("unordered: the bits of its gradients vary from run to run"));
}

TEST_F(BackwardFace, KernelsMayTakeNoGradientOfTheLse) {
  test::add_native(context_.registry(), "without", 10).declaration().backward->takes_grad_lse =
      false;
  const AttentionOptions options = causal(67);
  Attention attention(context_, options);
  for (const bool grad_lse : {false, true}) {
    const ring::BackwardRequest request{.grad_lse = grad_lse};
    attention.prepare_backward(request);
    EXPECT_EQ(attention.backward_pass(request)->implementations_of_ranks(),
              grad_lse ? "native" : "without");
  }
  AttentionOptions named = options;
  named.backward.implementation = "without";
  Attention refused(context_, named);
  EXPECT_THAT(test::message_of<UserError>([&] { refused.prepare_backward({.grad_lse = true}); }),
              HasSubstr("without: it takes no gradient of the LSE"));
}

TEST_F(BackwardFace, KernelsMayNotSumTheGradientOfABias) {
  BackwardDeclaration& declared =
      *test::add_native(context_.registry(), "without", 10).declaration().backward;
  AttentionOptions options = causal(67);
  const auto computed_by = [&](const Extents& bias, bool grad_bias = true) {
    options.bias = bias;
    Attention attention(context_, options);
    const ring::BackwardRequest request{.grad_bias = grad_bias};
    attention.prepare_backward(request);
    return attention.backward_pass(request)->implementations_of_ranks();
  };
  declared.sums_bias_over_keys = false;
  EXPECT_EQ(computed_by({2, 4, 67, 1}), "native");
  EXPECT_EQ(computed_by({2, 4, 67, 1}, false), "without");
  EXPECT_EQ(computed_by({1, 1, 1, 67}), "without");
  declared.sums_bias_over_keys = true;
  declared.repeats_bias_sums = false;
  for (const Extents& shared :
       {Extents{1, 4, 67, 67}, Extents{2, 1, 67, 67}, Extents{2, 4, 1, 67}}) {
    options.reproducible = Reproducible::run;
    EXPECT_EQ(computed_by(shared), "native") << to_string(shared);
    options.reproducible = Reproducible::no;
    EXPECT_EQ(computed_by(shared), "without") << to_string(shared);
  }
  options.reproducible = Reproducible::run;
  EXPECT_EQ(computed_by({2, 4, 67, 67}), "without");
  options.bias = Extents{1, 4, 67, 67};
  options.backward.implementation = "without";
  Attention refused(context_, options);
  EXPECT_THAT(test::message_of<UserError>([&] { refused.prepare_backward({.grad_bias = true}); }),
              HasSubstr("without: the bias's gradient is a sum over batches, heads or rows"));
}

// One rounding more than in an unsharded call, of which reports tell.
TEST_F(BackwardFace, SumsOfRoundedGradientsAreKnown) {
  test::add_native(context_.registry(), "rounding", 10).declaration().backward->rounds = true;
  AttentionOptions options = causal(67);
  for (const char* name : {"rounding", "native"}) {
    options.backward.implementation = name;
    Attention attention(context_, options);
    attention.prepare_backward();
    const ring::ShardedAttention& pass = *attention.backward_pass();
    EXPECT_EQ(pass.reduces_rounded(), std::string("rounding") == name && context_.size() > 1);
  }
}

TEST_F(BackwardFace, KernelsAreToldWhetherBitsMustRepeat) {
  struct Recording final : Kernel {
    Recording(std::unique_ptr<Kernel> kernel, std::set<bool>& all)
        : native(std::move(kernel)), asked(all) {}
    void forward(const AttentionBlock& block, const SoftmaxState& result,
                 const ExecutionContext& context) override {
      native->forward(block, result, context);
    }
    void backward(const BackwardBlock& block, const Gradients& gradients,
                  const ExecutionContext& context) override {
      asked.insert(block.repeats_bits);
      native->backward(block, gradients, context);
    }
    std::unique_ptr<Kernel> native;
    std::set<bool>& asked;
  };
  std::set<bool> asked;
  test::add_native(context_.registry(), "recording", 10, [&](std::unique_ptr<Kernel> native) {
    return std::make_unique<Recording>(std::move(native), asked);
  });
  AttentionOptions options = causal(67);
  for (const bool repeats : {false, true}) {
    asked.clear();
    options.reproducible = repeats ? Reproducible::run : Reproducible::no;
    options.backward.implementation = "recording";
    Attention attention(context_, options);
    expect_right_gradients(attention, options, 3);
    EXPECT_EQ(asked, std::set{repeats});
  }
}

TEST_F(BackwardFace, WhatAKernelRefusesWhenItIsPreparedAnotherComputes) {
  struct Refusing final : Kernel {
    void prepare_backward(const BackwardBlock& block, const Gradients& gradients) override {
      if (gradients.query.shape() == block.query.shape()) throw UnsupportedError("not today");
    }
    void forward(const AttentionBlock& /*block*/, const SoftmaxState& /*result*/,
                 const ExecutionContext& /*context*/) override {
      throw InternalError("only for gradients");
    }
  };
  test::add_native(context_.registry(), "refusing", 10,
                   [](const std::unique_ptr<Kernel>&) { return std::make_unique<Refusing>(); });
  AttentionOptions options = causal(67);
  options.implementation = "native";
  options.backward.implementation = "auto";
  Attention attention(context_, options);
  expect_right_gradients(attention, options, 3);
  EXPECT_EQ(attention.backward_pass()->implementations_of_ranks(), "native");
}

TEST_F(BackwardFace, Modifiers) {
  AttentionOptions options = causal(53);
  options.dropout.emplace(0.3, 8);
  options.soft_cap = 2.0;
  options.scale = 0.7;
  options.sinks = Sinks({4, 2}, {0, 1, 2, 3, -1, -2, 5, 0.5F});
  Attention attention(context_, options);
  expect_right_gradients(attention, options, 3);
}

// Checks the gradients, first written and then added to earlier values. The gradient `other` is
// computed beside them; every rank has all of its values.
void expect_gradients_beside(Attention& attention, const AttentionOptions& options,
                             BackwardShards& shards, BackwardTensors tensors,
                             float* BackwardTensors::*other, const OracleGradient& true_other,
                             const OracleGradients& truth) {
  for (const bool accumulate : {false, true}) {
    const float before = accumulate ? kBefore : 0;
    std::vector<float> found(true_other.values.size(), accumulate ? kBefore : NAN);
    tensors.grad_lse = shards.grad_lse.data();
    tensors.*other = found.data();
    tensors.accumulate = accumulate;
    shards.clear(accumulate ? kBefore : NAN);
    attention.backward(tensors);
    expect_gradients(attention, options, shards, truth, before);
    for (std::size_t i = 0; i < found.size(); ++i) {
      ASSERT_NEAR(found[i] - before, true_other.values[i],
                  2e-5 * (true_other.magnitudes[i] + before))
          << "entry " << i;
    }
  }
}

// By head and shared by all heads, written and added.
TEST_F(BackwardFace, GradientOfTheSinks) {
  AttentionOptions options = causal(53);
  for (const bool shared : {false, true}) {
    options.sinks = shared ? Sinks({2}, {0.5F, 1}) : Sinks({4, 2}, {0, 1, 2, 3, -1, -2, 5, 0.5F});
    Attention attention(context_, options);
    BackwardShards shards(attention, 3);
    attention.run(shards.tensors(true));
    const Extents shape = attention.sinks_shape();
    EXPECT_EQ(shape, shared ? Extents({2}) : Extents({4, 2}));
    const OracleGradients truth = true_gradients(options, 3, true);
    ASSERT_EQ(truth.sinks.values.size(), static_cast<std::size_t>(shape.product()));
    expect_gradients_beside(attention, options, shards, shards.backward(),
                            &BackwardTensors::grad_sinks, truth.sinks, truth);
  }
}

// The gradient of a bias of all rows is written, then added. tests/ring/gradient_cases.hpp has
// other biases and schedules.
TEST_F(BackwardFace, GradientOfTheBias) {
  AttentionOptions options = causal(37);
  const AttentionShape& s = options.shape;
  options.bias = Extents{1, 4, 1, 37};
  std::vector<float> bias(std::size_t{4} * 37);
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = std::sin(static_cast<float>(i));
  const OracleGradients truth =
      true_gradients(options, 3, true,
                     broadcast_scores({bias.data(), DType::float32, *options.bias}, {},
                                      {s.batch, s.heads, s.query_length, s.kv_length}));
  Attention attention(context_, options);
  EXPECT_EQ(attention.bias_shape(), *options.bias);
  BackwardShards shards(attention, 3);
  AttentionTensors forward = shards.tensors(true);
  forward.bias = bias.data();
  attention.run(forward);
  BackwardTensors tensors = shards.backward();
  tensors.bias = bias.data();
  ASSERT_EQ(truth.bias.values.size(), bias.size());
  expect_gradients_beside(attention, options, shards, tensors, &BackwardTensors::grad_bias,
                          truth.bias, truth);
}

// Padding may hold anything.
TEST_F(BackwardFace, GradientsOfTheOutputPastItsLengthReachNothing) {
  const std::vector<std::int32_t> lengths{40, 17};
  AttentionOptions options = causal(53);
  options.mask.set_query_lengths(lengths);
  options.sinks = Sinks({2}, {0.5F, 1});
  const OracleGradients truth = true_gradients(options, 3, true);
  for (const char* implementation : {"native", "vanilla"}) {
    options.implementation = implementation;
    Attention attention(context_, options);
    BackwardShards shards(attention, 3);
    const Extents shape = attention.output_shape();
    for (std::int64_t b = 0; b < shape[0]; ++b) {
      for (std::int64_t t = 0; t < shape[1]; ++t) {
        const std::int64_t row = attention.query_positions().global(LocalPosition(t)).value();
        if (row < lengths[static_cast<std::size_t>(b)]) continue;
        const std::int64_t width = shape[2] * shape[3];
        std::fill_n(shards.grad_output.begin() + (b * shape[1] + t) * width, width, NAN);
      }
    }
    attention.run(shards.tensors(true));
    std::array<float, 2> grad_sinks{NAN, NAN};
    BackwardTensors tensors = shards.backward();
    tensors.grad_lse = shards.grad_lse.data();
    tensors.grad_sinks = grad_sinks.data();
    attention.backward(tensors);
    expect_gradients(attention, options, shards, 3, true);
    for (std::size_t i = 0; i < grad_sinks.size(); ++i) {
      EXPECT_NEAR(grad_sinks[i], truth.sinks.values[i], 2e-5 * truth.sinks.magnitudes[i]);
    }
  }
}

TEST_F(BackwardFace, AddsWhereAskedAndTakesTheGradientOfTheLse) {
  const AttentionOptions options = causal(41);
  Attention attention(context_, options);
  BackwardShards shards(attention, 3);
  attention.run(shards.tensors(true));
  for (const bool with_grad_lse : {false, true}) {
    for (const bool accumulate : {false, true}) {
      BackwardTensors tensors = shards.backward();
      if (with_grad_lse) tensors.grad_lse = shards.grad_lse.data();
      tensors.accumulate = accumulate;
      for (int call = 0; call < 2; ++call) {
        shards.clear(accumulate ? kBefore : NAN);
        attention.backward(tensors);
        expect_gradients(attention, options, shards, 3, with_grad_lse, accumulate ? kBefore : 0);
      }
    }
  }
}

TEST_F(BackwardFace, ScheduleAndImplementationAreChosenApart) {
  AttentionOptions options = causal(64);
  options.implementation = "native";
  options.schedule = context_.size() == 1 ? "local" : "pass_q";
  options.backward = {"vanilla", context_.size() == 1 ? "local" : "allgather"};
  Attention attention(context_, options);
  attention.prepare_backward();
  EXPECT_EQ(attention.implementations_of_ranks(), "native");
  EXPECT_EQ(ring::name_of(attention.backward_pass()->schedule().schedule),
            options.backward.schedule);
  expect_right_gradients(attention, options, 5);
}

TEST_F(BackwardFace, FollowsTheMask) {
  AttentionOptions options = causal(61);
  Attention attention(context_, options);
  for (const std::int32_t length : {61, 17, 5}) {
    options.mask = Mask();
    options.mask.set_causal(true);
    options.mask.set_kv_lengths({length, 60});
    attention.set_mask(options.mask);
    expect_right_gradients(attention, options, length);
  }
}

TEST_F(BackwardFace, SaysWhyThereAreNoGradients) {
  test::add_native(context_.registry(), "forward_only").declaration().backward.reset();
  const auto message = [&](const auto& change) {
    AttentionOptions options = causal(29);
    change(options);
    Attention attention(context_, options);
    return test::message_of<UserError>([&] { attention.prepare_backward(); });
  };
  EXPECT_THAT(message([](AttentionOptions& o) { o.normalize_output = false; }),
              HasSubstr("normalize_output: got false"));
  EXPECT_THAT(message([](AttentionOptions& o) { o.weights = true; }),
              HasSubstr("weights: got true"));
  EXPECT_THAT(message([](AttentionOptions& o) { o.implementation = "forward_only"; }),
              HasSubstr("forward_only: computes no gradients"));
  EXPECT_THAT(message([](AttentionOptions& o) { o.backward.schedule = "nothing"; }),
              HasSubstr("'nothing'"));
  if (context_.size() == 1) return;
  EXPECT_THAT(message([](AttentionOptions& o) { o.backward.grad_wire = DType::bfloat16; }),
              HasSubstr("gradients of float32 are not rounded to bfloat16"));
}

TEST_F(BackwardFace, GradientsGoInHalfTheBytes) {
  AttentionOptions options = causal(64);
  options.dtype = DType::bfloat16;
  options.backward.grad_wire = DType::bfloat16;
  for (const char* schedule : {"ring", "allgather"}) {
    options.backward.schedule = schedule;
    Attention attention(context_, options);
    attention.prepare_backward();
    EXPECT_EQ(attention.backward_pass()->adds_rounded_gradients(), context_.size() > 1) << schedule;
  }
}

// Also after some ranks have planned their kind of call.
TEST_F(BackwardFace, RanksAskForTheSameGradients) {
  if (context_.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  const bool last = context_.rank() == context_.size() - 1;
  AttentionOptions options = causal(29);
  options.sinks = Sinks({2}, {0.5F, 1});
  std::vector<float> grad_sinks(2);
  for (const char* planned : {"nothing", "others", "theirs"}) {
    SCOPED_TRACE(planned);
    Attention attention(context_, options);
    BackwardShards shards(attention, 3);
    attention.run(shards.tensors(true));
    if (std::string("nothing") != planned) attention.prepare_backward();
    if (std::string("theirs") == planned) attention.prepare_backward({.grad_sinks = true});
    BackwardTensors tensors = shards.backward();
    if (last) tensors.grad_sinks = grad_sinks.data();
    const std::string message =
        test::message_of<ArgumentError>([&] { attention.backward(tensors); });
    EXPECT_EQ(message, "gradients on rank " + std::to_string(context_.size() - 1) +
                           ": got written, with the gradient of the sinks, expected what rank 0 "
                           "asks for: written");
    shards.clear();
    attention.backward(shards.backward());
    expect_gradients(attention, options, shards, 3);
  }
}

TEST_F(BackwardFace, ErrorsAreThoseOfAllRanks) {
  const AttentionOptions options = causal(29);
  Attention attention(context_, options);
  BackwardShards shards(attention, 3);
  attention.run(shards.tensors(true));
  const auto message = [&](const auto& change) {
    BackwardTensors tensors = shards.backward();
    if (context_.rank() == context_.size() - 1) change(tensors);  // one rank is enough
    return test::message_of<UserError>([&] { attention.backward(tensors); });
  };
  if (context_.size() > 1) {
    EXPECT_THAT(message([](BackwardTensors& t) { t.accumulate = true; }), HasSubstr("added"));
  }
  EXPECT_THAT(message([](BackwardTensors& t) { t.grad_key = nullptr; }),
              HasSubstr("grad key: got a null pointer"));
  EXPECT_THAT(message([](BackwardTensors& t) { t.lse = nullptr; }),
              HasSubstr("LSE: got a null pointer"));
  EXPECT_THAT(test::message_of<UserError>([&] {
                float sink = 0;
                BackwardTensors tensors = shards.backward();
                tensors.grad_sinks = &sink;
                attention.backward(tensors);
              }),
              HasSubstr("grad sinks: got a tensor, expected none: the problem has no sinks"));
  float memory = 0;
  EXPECT_THAT(test::message_of<UserError>([&] {
                BackwardTensors tensors = shards.backward();
                tensors.grad_bias = &memory;
                attention.backward(tensors);
              }),
              HasSubstr("grad bias: got a tensor, expected none: the problem has no bias"));
  EXPECT_THAT(message([&](BackwardTensors& t) { t.bias = &memory; }), HasSubstr("bias: got"));
  // The object is as good as before.
  shards.clear();
  attention.backward(shards.backward());
  expect_gradients(attention, options, shards, 3);
}

}  // namespace
}  // namespace annulus
