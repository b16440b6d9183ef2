// Which link of the chain decides, on all ranks alike.
#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/ring/tuning_cache.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tests/ring/sharded_attention_fixture.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/scratch_directory.hpp"
#include "tuning/file.hpp"
#include "tuning/text.hpp"

namespace annulus::ring {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using verification::CaseShards;

enum class Fails : std::uint8_t { never, prepared, computing };

/// Sleeps before it computes, and fails when it is prepared or computes if it is told to.
class TrickyKernel final : public Kernel {
 public:
  TrickyKernel(std::unique_ptr<Kernel> kernel, int milliseconds, std::shared_ptr<Fails> fails)
      : kernel_(std::move(kernel)), milliseconds_(milliseconds), fails_(std::move(fails)) {}
  void prepare(const AttentionBlock& block, const SoftmaxState& result) override {
    if (*fails_ == Fails::prepared) throw LibraryError("its memory is gone");
    kernel_->prepare(block, result);
  }
  void forward(const AttentionBlock& block, const SoftmaxState& result,
               const ExecutionContext& context) override {
    if (*fails_ == Fails::computing) throw LibraryError("its launch fails");
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds_));
    kernel_->forward(block, result, context);
  }

 private:
  std::unique_ptr<Kernel> kernel_;
  int milliseconds_;
  std::shared_ptr<Fails> fails_;
};

/// Two kernels. The cost model is wrong about them: "promising" is assumed to be faster, and takes
/// longer. So heuristics choose it, and a measurement "quick".
class TuningChainTest : public ShardedAttentionFixture {
 protected:
  TuningChainTest() {
    problem_.shape = {1, 48, 48, 4, 2, 16, 8};
    registry_ = {};
    options_.tuning.policy = TuningPolicy::measure;
    options_.tuning.file = folder_.file("t.json");
    options_.tuning.cache = &cache_;
    add("quick", 1, 0, quick_fails_);
    add("promising", 1.5, 30, promising_fails_);
  }

  void add(std::string name, double speed, int milliseconds, const std::shared_ptr<Fails>& fails) {
    test::add_native(
        registry_, std::move(name), speed, [milliseconds, fails](std::unique_ptr<Kernel> native) {
          return std::make_unique<TrickyKernel>(std::move(native), milliseconds, fails);
        });
  }
  [[nodiscard]] bool leads() const { return mesh_.rank() == 0; }
  // Makes attention, and expects the same decision on all ranks.
  [[nodiscard]] Decision decided() {
    const Decision decision = attention().decision();
    const std::vector<std::string> all = mesh_.world().gather_text(to_json(decision));
    for (const std::string& one : all) EXPECT_EQ(one, all[0]);
    return decision;
  }
  [[nodiscard]] std::vector<TuningEntry> entries() const {
    return parse_tuning(test::read_bytes(options_.tuning.file), "t.json");
  }
  // Rank 0's file, as if another choice had been the best.
  void write_choice(const Choice& choice) {
    if (!leads()) return;
    TuningEntry entry = entries().at(0);
    entry.choice = choice;
    EXPECT_THAT(keep_in_file({options_.tuning.file}, entry), IsEmpty());
  }
  void forget() { cache_.clear(); }
  // Why the first candidate that prefers this kernel was passed over.
  static std::string reason_of(const Decision& decision, const std::string& implementation) {
    for (const TunedCandidate& one : decision.candidates) {
      if (one.choice.implementation != implementation) continue;
      EXPECT_EQ(one.seconds, 0);
      return one.reason;
    }
    return "it is no candidate";
  }
  static std::string passed_text(const Decision& decision) {
    std::string text;
    for (const Decision::Passed& one : decision.passed) {
      text += std::string(name_of(one.link)) + ": " + one.reason + "\n";
    }
    return text;
  }

  TuningCache cache_;
  test::ScratchDirectory folder_;
  std::shared_ptr<Fails> quick_fails_ = std::make_shared<Fails>(Fails::never);
  std::shared_ptr<Fails> promising_fails_ = std::make_shared<Fails>(Fails::never);
};

TEST_F(TuningChainTest, IsOffUnlessItIsAskedFor) {
  const TuningOptions defaults;
  EXPECT_EQ(defaults.policy, TuningPolicy::off);
  (void)decided();  // what was tuned before does not count
  options_.tuning.policy = TuningPolicy::off;
  const Decision decision = decided();
  EXPECT_EQ(decision.by, DecidedBy::heuristics);
  EXPECT_EQ(decision.why, "tuning is off");
  EXPECT_EQ(attention().implementations(), "promising");
}

TEST_F(TuningChainTest, AMeasurementFindsWhatIsFaster) {
  const Decision decision = decided();
  EXPECT_EQ(decision.by, DecidedBy::measurement) << passed_text(decision);
  EXPECT_EQ(decision.choice.implementation, "quick");
  EXPECT_THAT(decision.why, AllOf(HasSubstr("timed 2 of "), HasSubstr("kept in ")));
  EXPECT_THAT(decision.warnings, IsEmpty());
  double quick = 0, promising = 0;
  for (const TunedCandidate& one : decision.candidates) {
    if (!one.reason.empty()) continue;
    (one.choice.implementation == "quick" ? quick : promising) = one.seconds;
    EXPECT_GT(one.predicted, 0);
  }
  EXPECT_GT(quick, 0);
  EXPECT_GT(promising, 0.03);
  EXPECT_LT(quick, promising);
  EXPECT_EQ(fs::exists(options_.tuning.file), leads()) << "one rank writes";
}

TEST_F(TuningChainTest, TheSecondCallTunesNothing) {
  const Decision first = decided();
  const Decision second = decided();
  EXPECT_EQ(second.by, DecidedBy::memory);
  EXPECT_EQ(second.choice, first.choice);
  EXPECT_EQ(second.candidates, first.candidates);
  forget();
  const Decision third = decided();
  EXPECT_EQ(third.by, DecidedBy::file);
  EXPECT_EQ(third.choice, first.choice);
  EXPECT_THAT(third.why, HasSubstr("t.json, tuned on 20"));
  EXPECT_EQ(decided().by, DecidedBy::memory) << "what was read is kept in memory";
}

TEST_F(TuningChainTest, ReadsWithoutMeasuring) {
  options_.tuning.policy = TuningPolicy::cached;
  const Decision nothing = decided();
  EXPECT_EQ(nothing.by, DecidedBy::heuristics);
  EXPECT_EQ(nothing.why, "the cost model");
  EXPECT_THAT(passed_text(nothing), AllOf(HasSubstr("cache in memory: has no entry"),
                                          HasSubstr("cache in file: "), HasSubstr("is not there")));
  EXPECT_TRUE(fs::is_empty(folder_.path()));
  options_.tuning.policy = TuningPolicy::measure;
  (void)decided();
  forget();
  options_.tuning.policy = TuningPolicy::cached;
  EXPECT_EQ(decided().by, DecidedBy::file);
}

TEST_F(TuningChainTest, OneRankDecidesEvenIfFilesDiffer) {
  (void)decided();
  forget();
  // Each rank has a file of its own; rank 0's is the one that counts.
  mesh_.world().barrier();
  const std::string from_zero =
      mesh_.world().gather_text(leads() ? to_json(entries()) : std::string())[0];
  TuningEntry entry = parse_tuning(from_zero, "t.json").at(0);
  entry.choice.implementation = leads() ? "promising" : "quick";
  EXPECT_THAT(keep_in_file({options_.tuning.file}, entry), IsEmpty());
  const Decision decision = decided();
  EXPECT_EQ(decision.by, DecidedBy::file);
  EXPECT_EQ(decision.choice.implementation, "promising");
  EXPECT_EQ(attention().implementations(), "promising");
}

TEST_F(TuningChainTest, WhatTheCallerNamesIsNotTuned) {
  (void)decided();
  options_.implementation = "promising";
  const Decision decision = decided();
  EXPECT_EQ(decision.by, DecidedBy::caller);
  EXPECT_TRUE(decision.choice.is_open());
  EXPECT_EQ(attention().implementations(), "promising");
}

TEST_F(TuningChainTest, AnOverlayComesBeforeTheCaches) {
  (void)decided();
  options_.overlay.implementation = "promising";
  const Decision decision = decided();
  EXPECT_EQ(decision.by, DecidedBy::overlay);
  EXPECT_THAT(decision.why, HasSubstr("implementation promising"));
  EXPECT_EQ(attention().implementations(), "promising");
  // And after the caller, who has then decided.
  options_.implementation = "quick";
  EXPECT_EQ(attention().implementations(), "quick");
  const Decision overridden = decided();
  EXPECT_EQ(overridden.by, DecidedBy::caller);
  EXPECT_THAT(overridden.why, Not(HasSubstr("overlay")));
}

TEST_F(TuningChainTest, AnOverlayLeavesTheRestToTheChain) {
  options_.schedule = "auto";
  options_.overlay.schedule = "ring";
  const Decision decision = decided();
  EXPECT_EQ(decision.by, DecidedBy::measurement) << passed_text(decision);
  EXPECT_THAT(decision.why, HasSubstr("an overlay sets schedule ring"));
  EXPECT_EQ(attention().schedule().schedule, Schedule::ring);
}

TEST_F(TuningChainTest, ACandidateThatFailsIsPassedOver) {
  add("broken", 1.2, 0, std::make_shared<Fails>(Fails::prepared));
  options_.tuning.candidates = 100;
  const Decision decision = decided();
  EXPECT_EQ(decision.by, DecidedBy::measurement);
  EXPECT_EQ(decision.choice.implementation, "quick");
  EXPECT_THAT(reason_of(decision, "broken"), HasSubstr("its memory is gone"));
}

// On one rank, while the others compute: they would wait for its keys, and it could not tell them.
TEST_F(TuningChainTest, ACandidateThatFailsWhileItComputesIsPassedOver) {
  const int last = mesh_.size() - 1;
  add("broken", 1.2, 0,
      std::make_shared<Fails>(mesh_.rank() == last ? Fails::computing : Fails::never));
  options_.tuning.candidates = 100;
  for (const char* schedule : {"ring", "auto"}) {
    options_.schedule = schedule;
    const Decision decision = decided();
    EXPECT_EQ(decision.by, DecidedBy::measurement) << passed_text(decision);
    EXPECT_NE(decision.choice.implementation, "broken");
    const std::string rank = last > 0 ? "rank " + std::to_string(last) + ": " : "";
    EXPECT_EQ(reason_of(decision, "broken"), rank + "its launch fails");
    // And the ranks can go on.
    EXPECT_NO_THROW((void)computed());
  }
}

TEST_F(TuningChainTest, NothingIsSentInARehearsal) {
  TraceCollector collector;
  Tracer tracer;
  tracer.add_sink(collector);
  options_.tuning = {};
  options_.runner.tracer = &tracer;
  const CaseShards shards = this->shards();
  ShardedAttention attention = this->attention();
  const auto spans_of = [&](TraceCategory category) {
    return std::count_if(collector.spans().begin(), collector.spans().end(),
                         [&](const TraceSpan& span) { return span.label.category == category; });
  };
  attention.rehearse(shards.local_tensors());
  const auto blocks = static_cast<std::ptrdiff_t>(attention.rank_plan().all<Block>().size());
  EXPECT_EQ(spans_of(TraceCategory::kernel), blocks);
  EXPECT_EQ(spans_of(TraceCategory::transfer), 0);
  attention.run(shards.local_tensors());
  EXPECT_EQ(spans_of(TraceCategory::kernel), 2 * blocks);
  EXPECT_EQ(spans_of(TraceCategory::transfer) > 0, mesh_.size() > 1);
}

TEST_F(TuningChainTest, NoCandidateIsBegunWhenTheTimeIsOver) {
  options_.tuning.seconds = 1e-9;
  const Decision decision = decided();
  EXPECT_EQ(decision.by, DecidedBy::heuristics);
  EXPECT_THAT(passed_text(decision), HasSubstr("were used up"));
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(TuningChainTest, AChoiceOfTheFileThatIsImpossiblePassesOn) {
  (void)decided();
  for (const auto& [choice, reason] :
       {std::pair(Choice{.implementation = "fastest"}, "implementation fastest"),
        std::pair(Choice{.schedule = "ulysses"}, "schedule ulysses is not ring")}) {
    forget();
    write_choice(choice);
    options_.tuning.policy = TuningPolicy::cached;
    const Decision decision = decided();
    EXPECT_EQ(decision.by, DecidedBy::heuristics);
    EXPECT_THAT(passed_text(decision), HasSubstr(reason));
  }
  // Measured again, it is right again.
  options_.tuning.policy = TuningPolicy::measure;
  EXPECT_EQ(decided().by, DecidedBy::measurement);
  forget();
  EXPECT_EQ(decided().by, DecidedBy::file);
}

TEST_F(TuningChainTest, AChoiceOfTheFileThatFailsPassesOn) {
  (void)decided();
  forget();
  *quick_fails_ = Fails::prepared;
  options_.tuning.policy = TuningPolicy::cached;
  ShardedAttention attention = this->attention();
  EXPECT_EQ(attention.decision().by, DecidedBy::heuristics);
  EXPECT_THAT(passed_text(attention.decision()),
              AllOf(HasSubstr("implementation quick, fails: "), HasSubstr("its memory is gone")));
  EXPECT_EQ(attention.implementations(), "promising");
  // Memory has forgotten it. The file has not, so it is tried again from there.
  EXPECT_THAT(passed_text(this->attention().decision()),
              HasSubstr("cache in memory: has no entry"));
}

TEST_F(TuningChainTest, AnErrorListsWhatWasTried) {
  (void)decided();
  forget();
  *quick_fails_ = *promising_fails_ = Fails::prepared;
  const std::string message = test::message_of<AgreedFailure>([&] { (void)attention(); });
  EXPECT_THAT(message, AllOf(HasSubstr("its memory is gone"),
                             HasSubstr("before that, cache in memory: has no entry"),
                             HasSubstr("before that, cache in file: its choice"),
                             HasSubstr("before that, measurement: no candidate could be timed")));
  options_.tuning = {};
  EXPECT_THAT(test::message_of<AgreedFailure>([&] { (void)attention(); }),
              Not(HasSubstr("before that")));
}

// The caches and heuristics may choose the same plan, which fails each time.
TEST_F(TuningChainTest, AChoiceOfNothingThatFailsPassesOn) {
  (void)decided();
  for (const TuningPolicy policy : {TuningPolicy::cached, TuningPolicy::measure}) {
    forget();
    write_choice({});
    *quick_fails_ = *promising_fails_ = Fails::prepared;
    options_.tuning.policy = policy;
    EXPECT_THAT(test::message_of<AgreedFailure>([&] { (void)attention(); }),
                AllOf(HasSubstr("its memory is gone"),
                      HasSubstr("before that, cache in file: its choice, nothing, fails")));
    *quick_fails_ = *promising_fails_ = Fails::never;
    EXPECT_EQ(decided().by, DecidedBy::file);  // memory has forgotten what failed
  }
}

TEST_F(TuningChainTest, AFileThatCannotBeReadIsAWarning) {
  std::ofstream(options_.tuning.file) << R"({"schema": "annulus.tuning", )";
  const Decision decision = attention().decision();
  EXPECT_EQ(decision.by, DecidedBy::measurement);
  if (leads()) {
    EXPECT_THAT(decision.warnings, ElementsAre(HasSubstr(".broken-1")));
    EXPECT_EQ(entries().size(), 1U);
  } else {
    EXPECT_THAT(decision.warnings, IsEmpty());
  }
}

TEST_F(TuningChainTest, AFileThatIsNoCacheIsAnErrorOfAllRanks) {
  if (leads()) std::ofstream(options_.tuning.file) << "nonsense";
  for (const TuningPolicy policy : {TuningPolicy::cached, TuningPolicy::measure}) {
    options_.tuning.policy = policy;
    EXPECT_THAT(test::message_of<UserError>([&] { (void)attention(); }),
                AllOf(HasSubstr("tuning cache: got "), HasSubstr("holds no tuning cache")));
  }
  options_.tuning.policy = TuningPolicy::off;
  EXPECT_NO_THROW((void)attention()) << "it is not read";
}

TEST_F(TuningChainTest, RanksMustAskForTheSame) {
  if (mesh_.size() == 1) GTEST_SKIP() << "needs 2 ranks";
  const ShardedAttentionOptions good = options_;
  const bool odd = mesh_.rank() == mesh_.size() - 1;
  if (odd) options_.tuning.policy = TuningPolicy::off;
  EXPECT_THAT(test::message_of<ArgumentError>([&] { (void)attention(); }),
              AllOf(HasSubstr("tuning off"), HasSubstr("expected tuning measure")));
  options_ = good;
  if (odd) options_.overlay.implementation = "quick";
  EXPECT_THAT(test::message_of<ArgumentError>([&] { (void)attention(); }),
              HasSubstr("overlay of implementation quick"));
}

TEST_F(TuningChainTest, LimitsMustMakeSense) {
  const TuningOptions good = options_.tuning;
  for (const auto& change : std::vector<std::function<void(TuningOptions&)>>{
           [](TuningOptions& t) { t.factor = 0.5; }, [](TuningOptions& t) { t.candidates = 0; },
           [](TuningOptions& t) { t.runs = 0; }, [](TuningOptions& t) { t.seconds = 0; }}) {
    options_.tuning = good;
    change(options_.tuning);
    EXPECT_THROW((void)attention(), ArgumentError);
  }
}

// Whatever is chosen computes what it would compute if it were named, bit by bit; others do not.
TEST_F(TuningChainTest, ChangesNoBitOfWhatItChooses) {
  options_.schedule = "auto";
  options_.tuning.runs = 1;
  problem_.shape = {1, 300, 300, 8, 8, 16, 16};
  const auto differ_anywhere = [&](const CaseShards& one, const CaseShards& other) {
    const bool same = same_bits(one.output, other.output) && same_bits(one.lse, other.lse);
    return mesh_.world().max(std::array{same ? 0.0 : 1.0})[0] > 0;
  };
  (void)computed();
  int others = 0;
  // Each of them from the file, as if it had been the best.
  for (const TunedCandidate& candidate : decided().candidates) {
    if (candidate.seconds == 0) continue;
    const Choice choice = candidate.choice;
    options_.tuning.policy = TuningPolicy::cached;
    forget();
    write_choice(choice);
    const Decision decision = decided();
    EXPECT_EQ(decision.choice, choice) << passed_text(decision);
    const CaseShards tuned = computed();
    const ShardedAttentionOptions open = options_;
    options_.tuning = {};
    options_.schedule = choice.schedule.empty() ? "auto" : choice.schedule;
    options_.plan.emplace();
    options_.plan->preferred = choice.implementation;
    options_.plan->ulysses_degree = choice.ulysses_degree;
    options_.plan->inner_size = choice.inner_size;
    options_.plan->head_group_bytes = choice.head_group_bytes;
    EXPECT_FALSE(differ_anywhere(tuned, computed())) << choice_text(choice);
    options_ = open;
    options_.tuning = {};
    if (differ_anywhere(tuned, computed())) ++others;
    options_ = open;
  }
  if (mesh_.size() > 2) {
    EXPECT_GT(others, 0) << "whatever was chosen computes the same bits: nothing was compared";
  }
}

// All schedules are candidates; masks and strides may change afterwards.
TEST_F(TuningChainTest, WhatIsChosenStays) {
  options_.schedule = "auto";
  options_.tuning.runs = 1;
  ShardedAttention attention = this->attention();
  const Schedule schedule = attention.schedule().schedule;
  Mask causal;
  causal.set_causal(true);
  attention.set_mask(causal);
  EXPECT_EQ(attention.schedule().schedule, schedule);
  EXPECT_NO_THROW((void)computed(attention));
  EXPECT_EQ(attention.decision().by, DecidedBy::measurement);
}

// With bias, mask and an unnormalised output, and halves.
TEST_F(TuningChainTest, MeasuresEveryKindOfCall) {
  options_.tuning.runs = 1;
  problem_.bias = Extents{1, 4, 48, 48};
  problem_.dense_mask = Extents{1, 1, 1, 48};
  problem_.normalize_output = false;
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    problem_.dtype = dtype;
    const Decision decision = decided();
    EXPECT_EQ(decision.by, DecidedBy::measurement) << passed_text(decision);
  }
}

}  // namespace
}  // namespace annulus::ring
