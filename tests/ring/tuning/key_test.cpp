// Tests of what makes two calls the same to the tuning chain.
#include "tuning/key.hpp"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <cblas.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/ring/machine.hpp>

#include "tests/ring/tuning/planned_call.hpp"

namespace annulus::ring {
namespace {

using ::testing::HasSubstr;

using Change = std::function<void(PlannedCall&, Machine&)>;

TuningKey key_after(const Change& change, int ranks = 4) {
  PlannedCall call(ranks);
  call.problem.mask.set_causal(true);
  Machine machine{{"a CPU"}, "0 x 4", "annulus 1, MPI 2", false, 3};
  change(call, machine);
  const PlanInput input = call.input();
  return make_tuning_key(input, call.options, call.options.schedule, call.open(input), machine);
}
void nothing(PlannedCall& /*call*/, Machine& /*machine*/) {}

TEST(TuningKey, IsReadable) {
  const TuningKey key = key_after(nothing);
  EXPECT_EQ(key.at("device"), "a CPU");
  EXPECT_EQ(key.at("versions"), "annulus 1, MPI 2");
  EXPECT_EQ(key.at("shape"), "B=1 T=4096 S=4096 N=8 K=4 D=64 Dv=64");
  EXPECT_EQ(key.at("local shapes"), "query [1, 1024, 8, 64], key [1, 1024, 4, 64]");
  EXPECT_EQ(key.at("dtype"), "float32");
  EXPECT_EQ(key.at("mask"), "band, 1/2 visible");
  EXPECT_EQ(key.at("modifiers"), "none");
  EXPECT_EQ(key.at("mesh"), "sp=4");
  EXPECT_EQ(key.at("ranks"), "4");
  EXPECT_EQ(key.at("nodes of ranks"), "0 x 4");
  EXPECT_EQ(key.at("implementations"), "quick, slow");
  EXPECT_EQ(key.at("threads"), "3");
  EXPECT_EQ(key.at("limits"), "8 candidates of 5 runs, predicted within 2 times the best, in 10 s");
  EXPECT_EQ(key.at("cost model"), CostModel::cpu_core().source);
}

// The program may run with another version than it was built with.
TEST(LibraryVersions, AreThoseThatWereLoaded) {
  const std::string loaded(openblas_get_config());  // "OpenBLAS 0.3.21 NO_LAPACKE …"
  const std::string text = library_versions(Place::host());
  EXPECT_EQ(loaded.rfind(text.substr(text.rfind(", ") + 2) + " ", 0), 0U) << text << "; " << loaded;
  EXPECT_THAT(text, HasSubstr("OpenBLAS 0."));
}

// An implementation may stand for a schedule; so "auto" is not what was named.
TEST(TuningKey, HasTheScheduleThatIsMeant) {
  PlannedCall call(1);  // nothing is open to choose from
  const PlanInput input = call.input();
  const Machine machine{{"a CPU"}, "0 x 1", "annulus 1", false, 1};
  const auto key = [&](const std::string& schedule) {
    return make_tuning_key(input, call.options, schedule, call.open(input), machine);
  };
  EXPECT_THAT(key("ring").at("named"), HasSubstr("schedule ring"));
  EXPECT_NE(key("ring"), key("auto"));
}

TEST(TuningKey, DiffersInAllThatMatters) {
  const TuningKey defaults = key_after(nothing);
  const std::vector<std::pair<std::string, Change>> changes{
      {"device", [](auto&, Machine& m) { m.devices = {"another CPU"}; }},
      {"device", [](auto&, Machine& m) { m.shares_gpus = true; }},
      {"versions", [](auto&, Machine& m) { m.versions = "annulus 2"; }},
      {"versions", [](PlannedCall& c, auto&) { c.options.tuning.build = "1a2b3c4d5e"; }},
      {"nodes of ranks", [](auto&, Machine& m) { m.nodes = "0 x 2, 1 x 2"; }},
      {"threads", [](auto&, Machine& m) { m.threads = 1; }},
      {"shape", [](PlannedCall& c, auto&) { c.problem.shape.kv_heads = 8; }},
      {"dtype", [](PlannedCall& c, auto&) { c.problem.dtype = DType::bfloat16; }},
      {"mask", [](PlannedCall& c, auto&) { c.problem.mask = {}; }},
      {"mask", [](PlannedCall& c, auto&) { c.problem.mask.set_window(64, 0); }},
      {"mask", [](PlannedCall& c, auto&) { c.problem.mask.set_kv_lengths({4000}); }},
      {"limits", [](PlannedCall& c, auto&) { c.options.tuning.candidates = 2; }},
      {"limits", [](PlannedCall& c, auto&) { c.options.tuning.factor = 3; }},
      {"modifiers", [](PlannedCall& c, auto&) { c.problem.soft_cap = 3; }},
      {"modifiers", [](PlannedCall& c, auto&) { c.problem.dropout.emplace(0.1, 1); }},
      {"modifiers", [](PlannedCall& c, auto&) { c.problem.sinks = Sinks::random(8, 2, 1); }},
      {"modifiers",
       [](PlannedCall& c, auto&) {
         c.problem.bias = Extents{1, 1, 1, 4096};
       }},
      {"modifiers", [](PlannedCall& c, auto&) { c.problem.normalize_output = false; }},
      {"layout", [](PlannedCall& c, auto&) { c.layout.sequence = LayoutKind::zigzag; }},
      {"layout", [](PlannedCall& c, auto&) { c.layout.granule = 128; }},
      {"implementations", [](PlannedCall& c, auto&) { c.options.implementation = "quick"; }},
      {"named", [](PlannedCall& c, auto&) { c.options.schedule = "ring"; }},
      {"named", [](PlannedCall& c, auto&) { c.options.plan.emplace().ulysses_degree = 2; }},
      {"named", [](PlannedCall& c, auto&) { c.options.plan.emplace().gather_bytes = 1; }},
      {"named", [](PlannedCall& c, auto&) { c.options.runner.replay = false; }}};
  for (const auto& [name, change] : changes) {
    const TuningKey key = key_after(change);
    EXPECT_NE(key, defaults) << name;
    EXPECT_NE(key.at(name), defaults.at(name));
  }
  EXPECT_NE(key_after(nothing, 2).at("mesh"), defaults.at("mesh"));
}

// Other scales, seeds, documents and lengths of the same kind do not need to be tuned again.
TEST(TuningKey, IsTheSameForWhatCostsTheSame) {
  const TuningKey defaults = key_after(nothing);
  EXPECT_EQ(key_after([](PlannedCall& c, auto&) { c.problem.scale = 3; }), defaults);
  const auto lengths = [](std::int32_t length) {
    return [length](PlannedCall& c, auto&) { c.problem.mask.set_kv_lengths({length}); };
  };
  EXPECT_EQ(key_after(lengths(3900)), key_after(lengths(4000)));
  EXPECT_NE(key_after(lengths(300)), key_after(lengths(4000)));
  const auto dropout = [](std::uint64_t seed) {
    return [seed](PlannedCall& c, auto&) { c.problem.dropout.emplace(0.1, seed); };
  };
  EXPECT_EQ(key_after(dropout(1)), key_after(dropout(2)));
  EXPECT_EQ(key_after([](PlannedCall& c, auto&) { c.problem.mask.set_kv_lengths({0}); }).at("mask"),
            "band+segments, nothing visible");
}

// A modifier that needs all pairs does not hide what the mask is.
TEST(TuningKey, HasTheKindOfMaskBesideABias) {
  const auto with_bias = [](bool causal, bool lengths) {
    return key_after([=](PlannedCall& c, auto&) {
             c.problem.bias = Extents{1, 1, 1, 4096};
             c.problem.mask = {};
             if (causal) c.problem.mask.set_causal(true);
             if (lengths) c.problem.mask.set_kv_lengths({2048});
           })
        .at("mask");
  };
  EXPECT_EQ(with_bias(false, false), "none, visible");
  EXPECT_EQ(with_bias(true, false), "band, 1/2 visible");
  EXPECT_EQ(with_bias(false, true), "segments, 1/2 visible");
}

}  // namespace
}  // namespace annulus::ring
