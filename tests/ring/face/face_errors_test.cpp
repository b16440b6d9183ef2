// Errors of the public interface on CPU ranks: all of them hear the same, whichever is wrong.
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/ring/cost_model.hpp>

#include "tests/ring/face/face_cases.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::HasSubstr;

TEST_F(Face, ErrorsAreTheSameOnAllRanks) {
  AttentionOptions options = causal(64);
  options.shape.kv_heads = 3;
  EXPECT_THROW(Attention(context_, options), UserError);
  options = causal(64);
  Attention attention(context_, options);
  Shards shards(attention, 1);
  AttentionTensors tensors = shards.tensors(true);
  if (context_.rank() == context_.size() - 1) tensors.key = nullptr;
  EXPECT_THAT(test::message_of<UserError>([&] { attention.run(tensors); }),
              HasSubstr("key: got a null pointer"));
  attention.run(shards.tensors(true));
  expect_right(attention, options, shards, 1, true);
}

// The call that overlaps another one touches nothing: the other one goes on, and so may the thread.
TEST_F(Face, OverlappingCallsOfTwoThreadsAreRefused) {
  AttentionOptions options = causal(64);
  Attention attention(context_, options);
  std::string message;
  bool filled = false;
  options.init_bias = InitBias{{1, 1, 1, 64}, [&](const TensorView& part, auto) {
                                 for (std::int64_t i = 0; i < part.elements(); ++i) {
                                   part.as<float>()[i] = 0;
                                 }
                                 std::thread([&] {
                                   message =
                                       test::message_of<LibraryError>([&] { attention.wait(); });
                                 }).join();
                                 filled = true;
                               }};
  Attention biased(context_, options);
  EXPECT_THAT(message, HasSubstr("Attention::wait on thread"));
  EXPECT_THAT(message, HasSubstr("during Attention::Attention on thread"));
  EXPECT_TRUE(filled);
  Shards shards(biased, 1);
  std::thread([&] { biased.run(shards.tensors(true)); }).join();
  expect_right(biased, options, shards, 1, true);
}

// The others may have begun the call, and cannot be asked any more.
TEST_F(Face, ErrorsOfLaterCallsAreOfOneRankAndNameIt) {
  Attention attention(context_, causal(64));
  Shards shards(attention, 1);
  attention.run(shards.tensors(true));
  AttentionTensors tensors = shards.tensors(true);
  tensors.maximum = tensors.lse;
  EXPECT_EQ(test::message_of<LibraryError>([&] { attention.run(tensors); }),
            "rank " + std::to_string(context_.rank()) +
                ": maximum: got memory, expected none: the options do not ask for an unnormalised "
                "output");
}

// Fields in which ranks may differ; and what they hear, all of them, where they may not.
template <class Options>
struct Difference {
  const char* field;
  std::function<void(Options&)> change;
  const char* error;  // part of its text; null: none
};

// Each rank in turn is the one that differs.
template <class Options, class Body>
void for_each_difference(const std::vector<Difference<Options>>& differences,
                         const Options& options, const Body& body) {
  const int size = test::session().size();
  if (size == 1) GTEST_SKIP() << "needs 2 ranks";
  for (const auto& [field, change, error] : differences) {
    for (const int odd : {0, size - 1}) {
      SCOPED_TRACE(std::string(field) + " of rank " + std::to_string(odd));
      Options mine = options;
      if (test::session().rank() == odd) change(mine);
      if (error == nullptr) {
        EXPECT_NO_THROW(body(mine));
      } else {
        EXPECT_THAT(test::message_of<UserError>([&] { body(mine); }), HasSubstr(error));
      }
    }
  }
}

TEST_F(Face, OneRanksContextOptionsOtherwise) {
  // One field more, and this does not compile: how may ranks differ in it?
  [[maybe_unused]] const auto& [mesh, place, devices, share_gpus, transport, timeout, threads] =
      ContextOptions();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  using Other = Difference<ContextOptions>;
  for_each_difference(
      std::vector<Other>{
          {"mesh", [](auto& o) { o.mesh = "sp="; }, "mesh: got 'sp='"},
          {"mesh", [](auto& o) { o.mesh = "tp=-1"; }, "mesh: got "},
          {"place", [](auto& o) { o.place = Place::cuda(77); }, "rank "},
          {"share_gpus", [](auto& o) { o.share_gpus = true; }, nullptr},
          {"timeout", [](auto& o) { o.timeout = 0; }, "timeout: got 0 s"},
          {"timeout", [](auto& o) { o.timeout = kNan; }, "timeout: got nan s"},
          {"timeout", [](auto& o) { o.timeout = 100; }, nullptr},
          {"timeout", [](auto& o) { o.timeout = 1e300; }, nullptr},
          {"devices", [](auto& o) { o.devices = DeviceRule::assigned; }, "devices"},
          {"threads", [](auto& o) { o.threads = 0; }, nullptr},
          {"threads", [](auto& o) { o.threads = 3; }, nullptr},
          {"transport", [](auto& o) { o.transport = Transport::nccl; }, "transport"},
      },
      on_host(), [](const ContextOptions& mine) {
        Context context(world(), mine);
        const AttentionOptions options = causal(37);
        Attention attention(context, options);
        expect_right_run(attention, options, 1);
      });
}

TEST_F(Face, OneRanksAttentionOptionsOtherwise) {
  // One field more, and this does not compile.
  [[maybe_unused]] const auto& [shape, dtype, scale, soft_cap, mask, sinks, dropout, softmax_dtype,
                                bias, dense_mask, weights, normalize_output, call_arguments,
                                reproducible] = AttentionProblem();
  [[maybe_unused]] const auto& [query_spec, kv_spec, rules, mode, layout, kv_layout, granule] =
      ring::LayoutOptions();
  [[maybe_unused]] const auto& [implementation, schedule, transport, ulysses_degree, inner_size,
                                head_group_bytes] = ring::Choice();
  const AttentionOptions options = causal(64);
  Attention before(context_, options);  // its group is there already
  Tracer tracer;
  using Other = Difference<AttentionOptions>;
  for_each_difference(
      std::vector<Other>{
          {"shape", [](auto& o) { o.shape.batch = 3; }, "B=3"},
          {"shape", [](auto& o) { o.shape.kv_heads = 3; }, "rank "},
          {"dtype", [](auto& o) { o.dtype = DType::bfloat16; }, "bfloat16"},
          {"mask", [](auto& o) { o.mask.set_offset(1); }, "mask"},
          {"call_arguments", [](auto& o) { o.call_arguments.lengths = true; }, "call arguments"},
          {"scale", [](auto& o) { o.scale = 3; }, "scale 3"},
          {"reproducible", [](auto& o) { o.reproducible = Reproducible::world; },
           "reproducible world"},
          {"soft_cap", [](auto& o) { o.soft_cap = 20; }, "soft cap 20"},
          {"sinks",
           [](auto& o) {
             o.sinks = Sinks({4, 1}, {1, 2, 3, 4});
           },
           "sinks [4, 1]"},
          {"sinks",
           [](auto& o) {
             o.sinks = Sinks({3, 1}, {1, 2, 3});
           },
           "sinks"},
          {"dropout", [](auto& o) { o.dropout.emplace(0.5, 8); }, "dropout 0.5, seed 8"},
          {"bias",
           [](auto& o) {
             o.bias = Extents{1, 4, 64, 64};
           },
           "bias [1, 4, 64, 64]"},
          {"dense_mask",
           [](auto& o) {
             o.dense_mask = Extents{1, 1, 1, 64};
           },
           "dense mask"},
          {"bias_policy", [](auto& o) { o.bias_policy = BiasPolicy::bias_wins; }, nullptr},
          {"init_bias",
           [](auto& o) {
             o.init_bias = InitBias{{1, 1, 1, 64}, {}};
           },
           "init_bias: got no function"},
          {"init_bias",
           [](auto& o) {
             o.init_bias = InitBias{{1, 1, 1, 64}, [](const auto&, auto) {}};
           },
           "bias [1, 1, 1, 64]"},
          {"query_spec", [](auto& o) { o.query_spec = PartitionSpec::parse("-,-"); }, "query"},
          {"kv_spec", [](auto& o) { o.kv_spec = PartitionSpec::parse("-,-"); }, "key/value"},
          {"softmax_dtype", [](auto& o) { o.softmax_dtype = DType::float64; }, "float64"},
          {"weights", [](auto& o) { o.weights = true; }, "vanilla"},
          {"normalize_output", [](auto& o) { o.normalize_output = false; }, "unnormalised"},
          {"rules",
           [](auto& o) {
             o.rules.set({SemanticAxis::query_length, {}, {}});
           },
           "query"},
          {"mode", [](auto& o) { o.mode = AttentionMode::insert; }, nullptr},  // the same specs
          {"layout", [](auto& o) { o.layout = LayoutKind::striped; }, "striped"},
          {"kv_layout", [](auto& o) { o.kv_layout = LayoutKind::striped; }, "striped"},
          {"granule", [](auto& o) { o.granule = 8; }, "zigzag:8"},
          {"schedule", [](auto& o) { o.schedule = "allgather"; }, "schedule"},
          {"schedule", [](auto& o) { o.schedule = "sideways"; }, "sideways"},
          {"ulysses_degree", [](auto& o) { o.ulysses_degree = 2; }, "ulysses degree 2"},
          {"inner_size", [](auto& o) { o.inner_size = 1; }, "inner size 1"},
          {"head_group_bytes", [](auto& o) { o.head_group_bytes = 7; }, "head group bytes 7"},
          {"transport", [](auto& o) { o.transport = Transport::nccl; }, "transport nccl"},
          {"implementation", [](auto& o) { o.implementation = "nobody"; }, "nobody"},
          {"tuning", [](auto& o) { o.tuning.policy = ring::TuningPolicy::cached; },
           "tuning cached"},
          {"tuning", [](auto& o) { o.tuning.candidates = 3; }, "3 candidates"},
          {"tuning", [](auto& o) { o.tuning.file = "elsewhere.json"; }, nullptr},
          {"plan", [](auto& o) { o.plan.emplace().result_bytes = 3; }, "result bytes 3"},
          {"cost_model",
           [](auto& o) {
             ring::CostModel model = ring::CostModel::cpu_core();
             model.merge_bytes_per_second *= 2;
             o.cost_model = std::make_shared<ring::CostModel>(model);
           },
           "cost model"},
          {"tracer", [&](auto& o) { o.tracer = &tracer; }, "traced"},
      },
      options, [&](const AttentionOptions& mine) { Attention(context_, mine); });
  expect_right_run(before, options, 1);
}

// The message holds what differs, and not all that the ranks have alike.
TEST_F(Face, RanksThatDisagreeAreToldTheDifference) {
  if (test::session().size() == 1) GTEST_SKIP() << "needs 2 ranks";
  AttentionOptions options = causal(64);
  if (context_.rank() == 1) options.soft_cap = 20;
  const std::string text = test::message_of<ArgumentError>([&] { Attention(context_, options); });
  EXPECT_THAT(text, AllOf(HasSubstr("attention on rank 1: got modifiers "),
                          HasSubstr("soft cap 20, expected what rank 0 computes, modifiers "),
                          Not(HasSubstr("shape")), Not(HasSubstr("schedule"))));
}

// One rank has no memory left for the LSE that its caller does not want.
TEST_F(Face, MemoryThatARunNeedsIsAgreedOn) {
  if (test::session().size() == 1) GTEST_SKIP() << "needs 2 ranks";
  ContextOptions hasty = on_host();
  hasty.timeout = 2;
  Context context(world(), hasty);
  const bool last = context.rank() == context.size() - 1;
  AttentionOptions options = causal(std::int64_t{1} << 20);  // more than a heap keeps in reserve
  options.shape = {1, options.shape.query_length, options.shape.kv_length, 64, 1, 1, 1};
  Attention attention(context, options);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  if (last) {
    constexpr rlim_t kRest = 4 << 20;
    rlim_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit tight{pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + kRest, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  }
  char somewhere = 0;  // nobody comes to look
  const AttentionTensors tensors{&somewhere, &somewhere, &somewhere, &somewhere, nullptr};
  const std::string text = test::message_of<AgreedFailure>([&] { attention.run(tensors); });
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_THAT(text, HasSubstr("no memory"));
}

TEST_F(Face, AMeshThatDoesNotFitIsRefused) {
  ContextOptions options = on_host();
  options.mesh = "sp=" + std::to_string(test::session().size() + 1);
  EXPECT_THROW(Context(world(), options), UserError);
  options.mesh = "sp=-1,tp";
  EXPECT_THROW(Context(world(), options), UserError);
}

TEST_F(Face, APlaceThatIsNotThereIsRefusedAndNotReplaced) {
  ContextOptions options = on_host();
  options.place = Place::cuda(77);
  EXPECT_THROW(Context(world(), options), UserError);
}

}  // namespace
}  // namespace annulus
