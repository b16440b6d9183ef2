#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>
#include <annulus/ring/cost_model.hpp>
#include <annulus/ring/used_share.hpp>

#include "tests/support/message_of.hpp"
#include "tests/support/thrown_by.hpp"

namespace annulus::ring {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr ProblemClass kHalfBand{DType::bfloat16, 64, 64, MaskKind::band, false};
constexpr ProblemClass kHalfBandBackward{DType::bfloat16, 64,    64,
                                         MaskKind::band,  false, Pass::backward};
constexpr ProblemClass kWideGeneral{DType::float32, 192, 128, MaskKind::general, true};

TEST(CostCurve, IsLinearBetweenPoints) {
  const CostCurve curve({{10, 1}, {20, 3}, {40, 4}}, "test");
  EXPECT_DOUBLE_EQ(curve.extended(10), 1);
  EXPECT_DOUBLE_EQ(curve.extended(15), 2);
  EXPECT_DOUBLE_EQ(curve.extended(20), 3);
  EXPECT_DOUBLE_EQ(curve.extended(30), 3.5);
  EXPECT_DOUBLE_EQ(curve.extended(40), 4);
}

TEST(CostCurve, BelowTheFirstPointAndPastTheLast) {
  const CostCurve curve({{10, 1}, {20, 3}, {40, 4}}, "test");
  EXPECT_DOUBLE_EQ(curve.extended(0), 1);
  EXPECT_DOUBLE_EQ(curve.extended(80), 8);  // as from the first point on
  EXPECT_DOUBLE_EQ(CostCurve({{10, 1}, {20, 1}, {40, 4}}, "test").extended(80), 10);
  EXPECT_DOUBLE_EQ(curve.clamped(0), 1);
  EXPECT_DOUBLE_EQ(curve.clamped(80), 4);
  // One that falls, by noise, says nothing of larger sizes, which then count in proportion.
  EXPECT_DOUBLE_EQ(CostCurve({{1, 3}, {2, 2}}, "test").extended(100), 100);
  EXPECT_DOUBLE_EQ(CostCurve::constant(7).extended(1e9), 7);
}

TEST(CostCurve, AtZero) {
  EXPECT_DOUBLE_EQ(CostCurve({{10, 2}, {20, 3}, {40, 9}}, "test").at_zero(), 1);
  EXPECT_DOUBLE_EQ(CostCurve({{10, 1}, {20, 3}}, "test").at_zero(), 0);  // not −1
  EXPECT_DOUBLE_EQ(CostCurve({{10, 3}, {20, 2}}, "test").at_zero(), 3);  // not 4
  EXPECT_DOUBLE_EQ(CostCurve({{10, 3}}, "test").at_zero(), 3);
}

TEST(CostCurve, RisesWhereNoiseMadeItFall) {
  EXPECT_EQ(CostCurve({{1, 4}, {2, 3}, {3, 5}, {4, 2}}, "test").rising(),
            CostCurve({{1, 4}, {2, 4}, {3, 5}, {4, 5}}, "test"));
}

TEST(CostCurve, RefusesWhatIsNoCurve) {
  EXPECT_THROW(CostCurve({}, "test"), ArgumentError);
  EXPECT_THROW(CostCurve({{1, 1}, {1, 2}}, "test"), ArgumentError);
  EXPECT_THROW(CostCurve({{2, 1}, {1, 2}}, "test"), ArgumentError);
  EXPECT_THROW(CostCurve({{-1, 1}}, "test"), ArgumentError);
  EXPECT_THROW(CostCurve({{1, 0}}, "test"), ArgumentError);
}

TEST(CostCurve, CrossoverIsWhereOneStaysBelow) {
  const CostCurve quick_start({{0, 1}, {100, 11}}, "test");
  const CostCurve fast({{0, 3}, {100, 5}}, "test");
  EXPECT_DOUBLE_EQ(crossover(quick_start, fast), 25);
  EXPECT_DOUBLE_EQ(crossover(fast, quick_start), -1);
  EXPECT_DOUBLE_EQ(
      crossover(CostCurve({{10, 2}, {100, 20}}, "a"), CostCurve({{0, 1}, {90, 9}}, "b")), 10);
}

TEST(KernelCost, RateFollowsTheRows) {
  const KernelCost cost{"test", CostCurve({{100, 1e9}, {200, 2e9}}, "test"), 0.5};
  EXPECT_DOUBLE_EQ(cost.seconds(1e9, 50, 1, 0), 1.5);
  EXPECT_DOUBLE_EQ(cost.seconds(1.5e9, 150, 1, 0), 1.5);
  EXPECT_DOUBLE_EQ(cost.seconds(1e9, 1000, 1, 0), 1);
  // The longer of computing and reading decides.
  EXPECT_DOUBLE_EQ(cost.seconds(1e9, 1000, 1, 0.4), 1);
  EXPECT_DOUBLE_EQ(cost.seconds(1e9, 1000, 1, 2), 2.5);
  // Half a device takes twice as long.
  EXPECT_DOUBLE_EQ(cost.seconds(1e9, 1000, 0.5, 0.4), 1.5);
}

// Causal squares on a GPU whose multiprocessors have one tile each, two, four.
TEST(KernelCost, AGpuIsUsedLessIfItsTilesEndApart) {
  const auto share = [](const BlockExtent& block, Place::Kind device = Place::Kind::cuda) {
    return used_share(device, block, 128);
  };
  const std::int64_t pairs = 512 * 513 / 2;
  const double longest = 512.0 * 512 / pairs;
  EXPECT_DOUBLE_EQ(longest_tile({512, 512, 33, 1, pairs}), longest);
  EXPECT_DOUBLE_EQ(share({512, 512, 33, 1, pairs}), 1 / longest);
  EXPECT_DOUBLE_EQ(share({512, 512, 33, 2, 2 * pairs}), 1 / (1 + (longest - 1) / 4));
  EXPECT_DOUBLE_EQ(share({512, 512, 132, 1, pairs}), 1 / (1 + (longest - 1) / 16));
  EXPECT_DOUBLE_EQ(share({512, 512, 33, 1, 512 * 512}), 1);
  EXPECT_DOUBLE_EQ(share({512, 512, 11, 1, 512 * 512}), 1.0 / 3);
  EXPECT_DOUBLE_EQ(share({100, 512, 132, 1, 100 * 512}), 100.0 / 128);  // a tile that is not full
  EXPECT_DOUBLE_EQ(longest_tile({512, 512, 1, 1, 1}), 2);
  EXPECT_DOUBLE_EQ(used_share(Place::Kind::host, {512, 512, 1, 1, pairs}, 1), 1);
}

TEST(KernelCost, FewTilesKeepPartOfAGpuBusy) {
  const auto share = [](std::int64_t rows, std::int64_t heads) {
    return busy_share(Place::Kind::cuda, rows, heads);
  };
  EXPECT_DOUBLE_EQ(share(1024, 64), 1);
  EXPECT_DOUBLE_EQ(share(1024, 8), 64.0 / 132);
  EXPECT_DOUBLE_EQ(share(1025, 8), 72.0 / 132);
  EXPECT_DOUBLE_EQ(share(1, 1), 1.0 / 132);
  EXPECT_DOUBLE_EQ(share(0, 1), 1.0 / 132);  // nothing takes no time
  EXPECT_DOUBLE_EQ(busy_share(Place::Kind::host, 1, 1), 1);
}

TEST(CostModel, HopperKnowsBothTransports) {
  CostModel model = CostModel::hopper_nvlink();
  EXPECT_EQ(model.transport, "peer");
  EXPECT_DOUBLE_EQ(model.transfer_seconds(64 << 20), 0.199e-3);
  EXPECT_DOUBLE_EQ(model.transfer_seconds(1), 0.017e-3);
  model.use_transport("nccl");
  EXPECT_DOUBLE_EQ(model.transfer_seconds(8 << 20), (8 << 20) / 123e9);
  const auto error = test::thrown_by<ArgumentError>([&] { model.use_transport("mpi"); });
  EXPECT_EQ(error.value(), "'mpi'");
  EXPECT_THAT(error.expected(), HasSubstr("nccl, peer"));
}

// Figures of two H200, with their noise.
CostCurve measured_nccl() {
  return {{{65536, 6.678e-05},
           {262144, 6.571e-05},
           {1048576, 7.578e-05},
           {4194304, 9.207e-05},
           {16777216, 9.653e-05},
           {67108864, 3.352e-04},
           {268435456, 9.835e-04}},
          "nccl"};
}

TEST(CostModel, MessagesTogetherCostNoLessThanTheirBytes) {
  const CostCurve noisy({{1 << 10, 5e-6}, {1 << 12, 4e-6}, {1 << 14, 1e-6}, {1 << 16, 9e-7}}, "");
  const CostCurve steep({{1 << 16, 1e-6}, {1 << 18, 8e-5}, {1 << 20, 9e-5}}, "steep");
  for (const CostCurve& curve :
       {measured_nccl(), noisy, steep, CostCurve::transfer(1e-6, 1e9), CostCurve::constant(1e-5)}) {
    for (const char* transport : {"mpi", "nccl", "peer"}) {
      CostModel model = CostModel::hopper_nvlink();
      model.transports = {{transport, curve.rising()}};
      model.transport = transport;
      double peak = 0;  // bytes per second
      for (double bytes = 1; bytes < 0x1p45; bytes *= 2) {
        peak = std::max(peak, bytes / model.transfer_seconds(bytes));
      }
      for (const double bytes : {1.0, 3e3, 65536.0, 262144.0, 1e6, 1e8, 1e10}) {
        double before = 0;
        for (const std::size_t count : {1U, 2U, 7U, 64U}) {
          const double together = model.transfer_seconds(std::vector(count, bytes));
          const double all = bytes * static_cast<double>(count);
          EXPECT_GE(together, all / peak * (1 - 1e-12))
              << transport << ", " << count << " of " << bytes;
          EXPECT_GE(together, model.transfer_seconds(bytes));
          EXPECT_GE(together, model.transfer_seconds(all));
          EXPECT_GE(together, before);
          EXPECT_LE(together, model.transfer_seconds(bytes) * static_cast<double>(count) +
                                  model.transfer_seconds(all));
          before = together;
        }
      }
    }
  }
}

TEST(CostModel, OnlyATransportThatStartsMessagesOnceSavesByThat) {
  CostModel model = CostModel::hopper_nvlink();
  for (auto& [name, curve] : model.transports) curve = CostCurve::transfer(1e-5, 1e11);
  model.transports.emplace("mpi", CostCurve::transfer(1e-5, 1e11));
  const std::vector<double> three{1e6, 2e6, 3e6};
  for (const auto& [transport, starts] : {std::pair{"nccl", 1}, {"peer", 1}, {"mpi", 3}}) {
    model.use_transport(transport);
    EXPECT_NEAR(model.transfer_seconds(three), starts * 1e-5 + 6e6 / 1e11, 1e-12) << transport;
    EXPECT_EQ(model.transfer_seconds(std::vector<double>()), 0);
  }
}

TEST(CostModel, ATransportThatItDoesNotKnowCostsWhatIsAssumed) {
  CostModel model = CostModel::hopper_nvlink();
  model.source = "measured: here";
  model.transports = {{"peer", CostCurve::constant(7)}};
  model.adopt_transport("self");  // sends nothing
  EXPECT_EQ(model.transport, "self");
  EXPECT_EQ(model.source, "measured: here");
  model.adopt_transport("nccl");
  EXPECT_EQ(model.transport, "nccl");
  EXPECT_EQ(model.transports.at("nccl"), CostModel::hopper_nvlink().transports.at("nccl"));
  EXPECT_EQ(model.source, "measured: here; assumed: messages by nccl");
  model.adopt_transport("peer");
  model.adopt_transport("nccl");
  EXPECT_EQ(model.transports.at("peer"), CostCurve::constant(7));
  EXPECT_EQ(model.source, "measured: here; assumed: messages by nccl");
}

TEST(CostModel, CompositeCostsWhatPeerDoesInsideANode) {
  CostModel model = CostModel::hopper_nvlink();
  const double inside = model.transfer_seconds(64 << 20);
  model.use_transport("composite");
  EXPECT_EQ(model.transport, "composite");
  EXPECT_EQ(model.transfer_seconds(64 << 20), inside);
  EXPECT_EQ(model.messages(true), model.network);
  EXPECT_EQ(parse_cost_model(to_json(model), "model.json").transport, "composite");

  model.source = "measured: here";
  model.transports.erase("peer");
  model.transport = "nccl";
  EXPECT_FALSE(model.knows("composite"));
  EXPECT_THROW(model.use_transport("composite"), ArgumentError);
  model.adopt_transport("composite");
  EXPECT_TRUE(model.knows("composite"));
  EXPECT_EQ(model.transfer_seconds(64 << 20), inside);
  EXPECT_EQ(model.source, "measured: here; assumed: messages by peer");
}

TEST(CostModel, SuitsThePlace) {
  EXPECT_EQ(CostModel::for_place(Place::host()).source, CostModel::cpu_core().source);
  EXPECT_EQ(CostModel::for_place(Place::cuda(3)).source, CostModel::hopper_nvlink().source);
}

void expect_file_error(const std::string& text, const std::string& expected) {
  EXPECT_THAT(test::message_of<FileError>([&] { (void)parse_cost_model(text, "model.json"); }),
              AllOf(HasSubstr("model.json"), HasSubstr(expected)));
}

// Two classes of one implementation, one of another.
CostModel measured_model() {
  CostModel model = CostModel::hopper_nvlink();
  model.source = "measured: here";
  model.kernels["native"] = {
      {kHalfBand, {"first", CostCurve({{100, 1e9 / 3}, {200, 2e9}}, "test"), 1e-6 / 3}},
      {kWideGeneral, {"second", CostCurve::constant(5e10), 0}}};
  model.kernels["sdpa"] = {{kHalfBand, {"third", CostCurve::constant(6e14), 9e-6}},
                           {kHalfBandBackward, {"fourth", CostCurve::constant(4e14), 2e-5}}};
  model.read_bytes_per_second = 4e12 / 3;
  model.assumed = {"transfer_share", "network_hops", "node_bytes_per_second"};
  return model;
}

TEST(CostModel, JsonKeepsEveryBit) {
  for (const CostModel& model :
       {CostModel::cpu_core(), CostModel::hopper_nvlink(), measured_model()}) {
    CostModel expected = model;
    if (model.device == Place::Kind::cuda) expected.threads = 0;
    EXPECT_EQ(parse_cost_model(to_json(model), "model.json"), expected);
  }
}

// Version 5 knew merges alone, and reading followed from them.
TEST(CostModel, ReadsFilesThatDoNotSayHowFastMemoryIsRead) {
  CostModel model = measured_model();
  EXPECT_DOUBLE_EQ(model.reading_seconds(4e12), 3);
  json data = json::parse(to_json(model));
  model.kernels.at("sdpa").erase(kHalfBandBackward);  // see the next test
  for (json& kernel : data["kernels"]) kernel.erase("pass");
  data["kernels"].erase(data["kernels"].end() - 1);
  data["version"] = 5;
  expect_file_error(data.dump(), "read_bytes_per_second is not a key");
  data.erase("read_bytes_per_second");
  for (const int version : {5, 6, 7}) {
    data["version"] = version;
    const CostModel again = parse_cost_model(data.dump(), "model.json");
    EXPECT_FALSE(again.read_bytes_per_second);
    EXPECT_EQ(again.kernels, model.kernels);
    EXPECT_DOUBLE_EQ(again.reading_seconds(3.3e12), 0.75);
  }
  CostModel host = CostModel::cpu_core();
  EXPECT_DOUBLE_EQ(host.reading_seconds(8e9), 1);
  // A measured value replaces the assumed one, and stays.
  host.source = model.source;
  host.refresh(model, false);
  EXPECT_EQ(host.read_bytes_per_second, model.read_bytes_per_second);
  model.read_bytes_per_second.reset();
  host.refresh(model, false);
  EXPECT_EQ(host.read_bytes_per_second, 4e12 / 3);
}

// All kernels of version 6 belong to the forward pass.
TEST(CostModel, ReadsFilesThatKnowNoPass) {
  json data = json::parse(to_json(measured_model()));
  EXPECT_EQ(data["version"], 7);
  EXPECT_EQ(data["kernels"].back()["pass"], "backward");
  data["version"] = 6;
  expect_file_error(data.dump(), "pass is not a key");
  data["kernels"].erase(data["kernels"].end() - 1);
  for (json& kernel : data["kernels"]) kernel.erase("pass");
  CostModel model = measured_model();
  model.kernels.at("sdpa").erase(kHalfBandBackward);
  EXPECT_EQ(parse_cost_model(data.dump(), "model.json").kernels, model.kernels);
  data["version"] = 7;
  data["kernels"][0]["pass"] = "sideways";
  expect_file_error(data.dump(), "kernels[0].pass is 'sideways', expected forward or backward");
}

TEST(CostModel, OtherNamesOfAKernelAreItsName) {
  json data = json::parse(to_json(measured_model()));
  for (json& kernel : data["kernels"]) {
    if (kernel["implementation"] == "sdpa") kernel["implementation"] = "cudnn";
  }
  EXPECT_EQ(parse_cost_model(data.dump(), "model.json").kernels, measured_model().kernels);
  // Twice the same class under two names.
  json again = data["kernels"].back();
  ASSERT_EQ(again["implementation"], "cudnn");
  again["implementation"] = "sdpa";
  data["kernels"].push_back(again);
  expect_file_error(data.dump(), "is a second entry of sdpa");
  data["kernels"].back()["implementation"] = "blocksparse";
  EXPECT_TRUE(parse_cost_model(data.dump(), "model.json").kernels.contains("flash_attn2"));
}

TEST(CostModel, TransportsThatFallAreReadAsLevel) {
  CostModel model = CostModel::hopper_nvlink();
  model.transports.at("nccl") = measured_nccl();
  model.network = measured_nccl();
  const CostModel again = parse_cost_model(to_json(model), "model.json");
  EXPECT_NE(again.transports.at("nccl"), measured_nccl());
  EXPECT_EQ(again.transports.at("nccl"), measured_nccl().rising());
  EXPECT_EQ(again.network, measured_nccl().rising());
}

TEST(CostModel, RefreshingKeepsWhatWasNotMeasuredAgain) {
  CostModel model = measured_model();
  CostModel newer;
  newer.source = model.source;
  const KernelCost again{"again", CostCurve::constant(7e14), 1e-5};
  ProblemClass capped = kHalfBand;
  capped.soft_cap = true;
  newer.kernels["sdpa"] = {{kHalfBand, again}, {capped, again}};
  newer.merge_bytes_per_second = 5;
  newer.transports = {{"nccl", CostCurve::constant(3)}};
  newer.transport = "nccl";
  newer.assumed.erase("transports");
  CostModel expected = model;
  expected.kernels["sdpa"].insert_or_assign(kHalfBand, again);
  expected.kernels["sdpa"].emplace(capped, again);
  expected.transports.at("nccl") = CostCurve::constant(3);
  CostModel keeping = model;
  keeping.refresh(newer, false);
  EXPECT_EQ(keeping.transports, expected.transports);
  EXPECT_EQ(keeping.transport, "peer");
  model.refresh(newer, true);
  EXPECT_EQ(model.kernels, expected.kernels);
  EXPECT_EQ(model.transports, expected.transports);
  EXPECT_EQ(model.merge_bytes_per_second, 5);
  EXPECT_EQ(model.transport, "nccl");
}

TEST(CostModel, WhatIsAssumedGivesWayToMeasurementsOnly) {
  CostModel model = measured_model();
  model.launch_seconds = 3e-6;
  CostModel newer = model;
  newer.assumed = {"launch_seconds", "transfer_share", "node_bytes_per_second"};
  newer.launch_seconds = 5;
  newer.transfer_share = 0.5;
  newer.network = CostCurve::constant(7);
  const double share = model.transfer_share;
  model.refresh(newer, true);
  EXPECT_EQ(model.launch_seconds, 3e-6);
  EXPECT_EQ(model.transfer_share, share);
  EXPECT_EQ(model.network, CostCurve::constant(7));
  EXPECT_EQ(model.assumed, (decltype(model.assumed){"transfer_share", "node_bytes_per_second"}));
  EXPECT_DOUBLE_EQ(model.transfer_seconds(1e9, true), 7);
}

// As on several nodes of one rank each.
TEST(CostModel, AssumedTransportsReplaceNoMeasuredOnes) {
  CostModel model = measured_model();
  model.transports = {{"peer", CostCurve::constant(3)}};
  CostModel newer = CostModel::hopper_nvlink();
  newer.source = model.source;
  model.refresh(newer, true);
  EXPECT_EQ(model.transports.at("peer"), CostCurve::constant(3));
  EXPECT_EQ(model.transports.at("nccl"), newer.transports.at("nccl"));
  EXPECT_FALSE(model.assumed.contains("transports"));
  model.assumed.insert("transports");
  newer.transports = {{"peer", CostCurve::constant(5)}};
  newer.assumed.erase("transports");
  model.refresh(newer, true);
  EXPECT_EQ(model.transports.at("peer"), CostCurve::constant(5));
  EXPECT_FALSE(model.assumed.contains("transports"));
}

TEST(CostModel, FiguresOfDifferentMachinesDoNotMix) {
  CostModel model = measured_model();
  CostModel newer = measured_model();
  newer.source = "measured: elsewhere";
  const auto error = test::thrown_by<ArgumentError>([&] { model.refresh(newer, true); });
  EXPECT_EQ(error.value(), "'measured: here'");
  EXPECT_THAT(error.expected(), HasSubstr("'measured: elsewhere', or another file"));
  EXPECT_NO_THROW(model.check_source("measured: here"));
  EXPECT_THROW(CostModel::cpu_core().check_source("measured: here"), ArgumentError);
}

TEST(CostModel, DeepBracketsAreRefused) {
  std::string text = to_json(CostModel::cpu_core());
  const std::string schema = "\"annulus.cost_model\"";
  // The message would print the value, and exhaust the stack.
  text.replace(text.find(schema), schema.size(),
               std::string(200'000, '[') + std::string(200'000, ']'));
  expect_file_error(text, "brackets more than 64 deep");
}

// A value in the place of one that a path names; discarded: none.
struct Damage {
  std::string path;
  json value;
  std::string error;
};

TEST(CostModel, DamagedFilesAreNamedWithTheKey) {
  expect_file_error("{", "is not JSON");
  expect_file_error("[]", "is not an object");
  expect_file_error("[1e400]", "beyond what float64 holds");
  CostModel model = CostModel::cpu_core();
  model.kernels["native"] = {{kHalfBand, {"test", CostCurve::constant(5e10), 1e-6}}};
  const json whole = json::parse(to_json(model));
  const json gone(json::value_t::discarded);
  const json points = json::parse(R"([{"bytes": 1, "seconds": 1}])");
  const std::string kernel = "/kernels/0/";
  std::vector<Damage> damages{
      {kernel + "call_latency_seconds", 1e308,
       "kernels[0].call_latency_seconds is 1e+308, expected a number from 0 to 3600"},
      {"/merge_bytes_per_second", 1e-300, "merge_bytes_per_second is 1e-300"},
      {kernel + "rates/0/flops_per_second", 1e-300,
       "kernels[0].rates[0].flops_per_second is 1e-300"},
      {"/transports/mpi/0/seconds", 1e308, "transports.mpi[0].seconds is 1e+308"},
      {"/transports/mpi/1/bytes", 1e-300, "transports.mpi takes more than 1 s per byte"},
      {"/source", gone, "source is missing"},
      {"/speed", 1, "speed is not a key"},
      {"/device", gone, "device is missing"},
      {"/device", "tpu", "device is 'tpu', expected cpu or cuda"},
      {"/version", 4,
       "schema is \"annulus.cost_model\" version 4, expected \"annulus.cost_model\" version 7, "
       "which annulus bench --calibrate writes where there is no file (delete this one, or name "
       "another), 6 or 5"},
      {"/version", gone, "version null"},
      {"/schema", "other", "schema is \"other\""},
      {kernel + "call_latency_seconds", "1", "kernels[0].call_latency_seconds is \"1\""},
      {kernel + "dtype", "int7", "kernels[0].dtype is 'int7'"},
      {kernel + "mask", "fog", "kernels[0].mask is 'fog', expected one of none, band"},
      {kernel + "head_dim", 64.5, "kernels[0].head_dim is 64.5, expected a whole number"},
      {kernel + "value_dim", 0, "kernels[0].value_dim is 0"},
      {kernel + "soft_cap", 1, "kernels[0].soft_cap is 1, expected a bool"},
      {kernel + "implementation", "flash",
       "kernels[0].implementation is 'flash', expected one of sdpa, flash_attn2, blocksparse, "
       "native, vanilla"},
      {kernel + "implementation", "ring", "kernels[0].implementation is 'ring'"},
      {"/device", "cuda",
       "transports.mpi is not a transport of device cuda, expected peer or nccl"},
      // The message ends with the zero.
      {std::string("/transports/mpi\0x", 17), points, "transports.mpi"},
      {kernel + "speed", 1, "kernels[0].speed is not a key"},
      {"/kernels/1", whole["kernels"][0],
       "kernels[1] is a second entry of native, bfloat16 D=64 Dv=64, mask band"},
      {"/read_bytes_per_second", "fast", "read_bytes_per_second is \"fast\", expected a number"},
      {"/merge_bytes_per_second", 0, "merge_bytes_per_second is 0"},
      {"/transfer_share", 1, "transfer_share is 1, expected a number from 0 to 0.99"},
      {"/node_bytes_per_second", "much", "node_bytes_per_second is \"much\""},
      {"/launch_seconds", -1, "launch_seconds is -1"},
      {"/network_hops", json::array(), "network_hops has no point"},
      {"/network_hops",
       {{{"bytes", 0}, {"seconds", 1}}, {{"bytes", 1e-3}, {"seconds", 2}}},
       "network_hops takes more than 1 s per byte"},
      {"/network_hops", gone, "network_hops is missing"},
      {"/assumed", "all", "assumed is not a list of names"},
      {"/assumed",
       {"weather"},
       "assumed has \"weather\", expected any of transports, transfer_share, "},
      {"/assumed", {3}, "assumed has 3"},
      {"/kernels", json::object(), "kernels is not a list"},
      {kernel + "rates", json::array(), "kernels[0].rates has no point"},
      {kernel + "rates", 3, "kernels[0].rates is not a list"},
      {kernel + "rates/0/rows", gone, "kernels[0].rates[0].rows is missing"},
      {"/transports/mpi/1/seconds", -1, "transports.mpi[1].seconds is -1"},
      {"/transports/mpi/1/bytes", 0, "transports.mpi has size 0 at point 1"},
      {"/transport", "pigeon", "transport is 'pigeon', which transports lacks"}};
  for (const std::string name : {"peer", "nccl", "self", "pigeon", "", "mp"}) {
    damages.push_back({"/transports/" + name, points,
                       "transports." + name + " is not a transport of device cpu, expected mpi"});
  }
  for (const Damage& damage : damages) {
    const json::json_pointer path(damage.path);
    json data = whole;
    if (damage.value.is_discarded()) {
      data.at(path.parent_pointer()).erase(path.back());
    } else {
      data[path] = damage.value;
    }
    expect_file_error(data.dump(), damage.error);
  }
}

}  // namespace
}  // namespace annulus::ring
