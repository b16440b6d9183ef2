#include <functional>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>
#include <annulus/ring/cost_model.hpp>

namespace annulus::ring {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

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
  EXPECT_DOUBLE_EQ(curve.extended(80), 6);
  EXPECT_DOUBLE_EQ(curve.clamped(0), 1);
  EXPECT_DOUBLE_EQ(curve.clamped(80), 4);
  // A last segment that falls, by noise, does not go on falling.
  EXPECT_DOUBLE_EQ(CostCurve({{1, 3}, {2, 2}}, "test").extended(100), 2);
  EXPECT_DOUBLE_EQ(CostCurve::constant(7).extended(1e9), 7);
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

TEST(CostModel, KernelRateFollowsTheRows) {
  CostModel model = CostModel::cpu_core();
  model.kernels.emplace("native", CostCurve({{100, 1e9}, {200, 2e9}}, "test"));
  model.call_latency = 0.5;
  EXPECT_DOUBLE_EQ(model.kernel_seconds("native", 1e9, 50), 1.5);
  EXPECT_DOUBLE_EQ(model.kernel_seconds("native", 1.5e9, 150), 1.5);
  EXPECT_DOUBLE_EQ(model.kernel_seconds("native", 1e9, 1000), 1);
  EXPECT_THROW((void)model.kernel_seconds("sdpa", 1, 1), InternalError);
}

TEST(CostModel, HopperKnowsBothTransports) {
  CostModel model = CostModel::hopper_nvlink();
  EXPECT_EQ(model.transport, "peer");
  EXPECT_DOUBLE_EQ(model.transfer_seconds(64 << 20), 0.199e-3);
  EXPECT_DOUBLE_EQ(model.transfer_seconds(1), 0.017e-3);
  model.use_transport("nccl");
  EXPECT_DOUBLE_EQ(model.transfer_seconds(8 << 20), (8 << 20) / 123e9);
  try {
    model.use_transport("mpi");
    FAIL() << "no error";
  } catch (const ArgumentError& error) {
    EXPECT_THAT(error.what(), HasSubstr("'mpi'"));
    EXPECT_THAT(error.what(), HasSubstr("nccl, peer"));
  }
}

TEST(CostModel, SuitsThePlace) {
  EXPECT_EQ(CostModel::for_place(Place::host()).source, CostModel::cpu_core().source);
  EXPECT_EQ(CostModel::for_place(Place::cuda(3)).source, CostModel::hopper_nvlink().source);
}

TEST(CostModel, JsonKeepsEveryBit) {
  for (CostModel model : {CostModel::cpu_core(), CostModel::hopper_nvlink()}) {
    model.kernels.emplace("native", CostCurve({{100, 1e9 / 3}, {200, 2e9}}, "test"));
    const CostModel again = parse_cost_model(to_json(model), "model.json");
    EXPECT_EQ(again.source, model.source);
    EXPECT_EQ(again.kernels, model.kernels);
    EXPECT_EQ(again.call_latency, model.call_latency);
    EXPECT_EQ(again.merge_bytes_per_second, model.merge_bytes_per_second);
    EXPECT_EQ(again.transports, model.transports);
    EXPECT_EQ(again.transport, model.transport);
  }
}

void expect_file_error(const std::string& text, const std::string& expected) {
  try {
    (void)parse_cost_model(text, "model.json");
    ADD_FAILURE() << "no error; expected " << expected;
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), HasSubstr("model.json"));
    EXPECT_THAT(error.what(), HasSubstr(expected));
  }
}

TEST(CostModel, DeepBracketsAreRefused) {
  std::string text = to_json(CostModel::cpu_core());
  const std::string schema = "\"annulus.cost_model\"";
  // The message would print the value, and exhaust the stack.
  text.replace(text.find(schema), schema.size(),
               std::string(200'000, '[') + std::string(200'000, ']'));
  expect_file_error(text, "brackets more than 64 deep");
}

TEST(CostModel, DamagedFilesAreNamedWithTheKey) {
  const auto damaged = [](const std::function<void(json&)>& damage) {
    CostModel model = CostModel::cpu_core();
    model.kernels.emplace("native", CostCurve::constant(5e10));
    json data = json::parse(to_json(model));
    damage(data);
    return data.dump();
  };
  expect_file_error("{", "is not JSON");
  expect_file_error("[]", "is not an object");
  expect_file_error("[1e400]", "beyond what float64 holds");
  expect_file_error(damaged([](json& d) { d["call_latency_seconds"] = 1e308; }),
                    "call_latency_seconds is 1e+308, expected a number from 0 to 3600");
  expect_file_error(damaged([](json& d) { d["merge_bytes_per_second"] = 1e-300; }),
                    "merge_bytes_per_second is 1e-300");
  expect_file_error(
      damaged([](json& d) { d["kernels"]["native"][0]["flops_per_second"] = 1e-300; }),
      "kernels.native[0].flops_per_second is 1e-300");
  expect_file_error(damaged([](json& d) { d["transports"]["mpi"][0]["seconds"] = 1e308; }),
                    "transports.mpi[0].seconds is 1e+308");
  expect_file_error(damaged([](json& d) { d["transports"]["mpi"][1]["bytes"] = 1e-300; }),
                    "transports.mpi takes more than 1 s per byte");
  expect_file_error(damaged([](json& d) { d.erase("source"); }), "source is missing");
  expect_file_error(damaged([](json& d) { d["speed"] = 1; }), "speed is no key");
  expect_file_error(damaged([](json& d) { d["version"] = 1; }), "version 1");
  expect_file_error(damaged([](json& d) { d["call_latency_seconds"] = "1"; }),
                    "call_latency_seconds is \"1\"");
  expect_file_error(damaged([](json& d) { d["merge_bytes_per_second"] = 0; }),
                    "merge_bytes_per_second is 0");
  expect_file_error(damaged([](json& d) { d["kernels"]["native"] = json::array(); }),
                    "kernels.native has no point");
  expect_file_error(damaged([](json& d) { d["kernels"]["native"] = 3; }),
                    "kernels.native is not a list");
  expect_file_error(damaged([](json& d) { d["kernels"]["native"][0].erase("rows"); }),
                    "kernels.native[0].rows is missing");
  expect_file_error(damaged([](json& d) { d["transports"]["mpi"][1]["seconds"] = -1; }),
                    "transports.mpi[1].seconds is -1");
  expect_file_error(damaged([](json& d) { d["transports"]["mpi"][1]["bytes"] = 0; }),
                    "transports.mpi has size 0 at point 1");
  expect_file_error(damaged([](json& d) { d["transport"] = "pigeon"; }),
                    "transport is 'pigeon', which transports lacks");
}

}  // namespace
}  // namespace annulus::ring
