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

constexpr ProblemClass kHalfBand{DType::bfloat16, 64, 64, MaskKind::band, false};
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

TEST(KernelCost, RateFollowsTheRows) {
  const KernelCost cost{"test", CostCurve({{100, 1e9}, {200, 2e9}}, "test"), 0.5};
  EXPECT_DOUBLE_EQ(cost.seconds(1e9, 50), 1.5);
  EXPECT_DOUBLE_EQ(cost.seconds(1.5e9, 150), 1.5);
  EXPECT_DOUBLE_EQ(cost.seconds(1e9, 1000), 1);
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

// Two classes of one implementation, one of another.
CostModel measured_model() {
  CostModel model = CostModel::hopper_nvlink();
  model.source = "measured: here";
  model.kernels["native"] = {
      {kHalfBand, {"first", CostCurve({{100, 1e9 / 3}, {200, 2e9}}, "test"), 1e-6 / 3}},
      {kWideGeneral, {"second", CostCurve::constant(5e10), 0}}};
  model.kernels["sdpa"] = {{kHalfBand, {"third", CostCurve::constant(6e14), 9e-6}}};
  return model;
}

TEST(CostModel, JsonKeepsEveryBit) {
  for (const CostModel& model :
       {CostModel::cpu_core(), CostModel::hopper_nvlink(), measured_model()}) {
    const CostModel again = parse_cost_model(to_json(model), "model.json");
    EXPECT_EQ(again.source, model.source);
    EXPECT_EQ(again.kernels, model.kernels);
    EXPECT_EQ(again.merge_bytes_per_second, model.merge_bytes_per_second);
    EXPECT_EQ(again.transports, model.transports);
    EXPECT_EQ(again.transport, model.transport);
  }
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
  CostModel expected = model;
  expected.kernels["sdpa"] = {{kHalfBand, again}, {capped, again}};
  expected.transports.at("nccl") = CostCurve::constant(3);
  model.refresh(newer);
  EXPECT_EQ(model.kernels, expected.kernels);
  EXPECT_EQ(model.transports, expected.transports);
  EXPECT_EQ(model.merge_bytes_per_second, 5);
  EXPECT_EQ(model.transport, "nccl");
}

TEST(CostModel, FiguresOfDifferentMachinesDoNotMix) {
  CostModel model = measured_model();
  CostModel newer = measured_model();
  newer.source = "measured: elsewhere";
  try {
    model.refresh(newer);
    FAIL() << "no error";
  } catch (const ArgumentError& error) {
    EXPECT_THAT(error.what(), HasSubstr("got 'measured: here'"));
    EXPECT_THAT(error.what(), HasSubstr("'measured: elsewhere', or another file"));
  }
  EXPECT_NO_THROW(model.check_source("measured: here"));
  EXPECT_THROW(CostModel::cpu_core().check_source("measured: here"), ArgumentError);
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
    model.kernels["native"] = {{kHalfBand, {"test", CostCurve::constant(5e10), 1e-6}}};
    json data = json::parse(to_json(model));
    damage(data);
    return data.dump();
  };
  expect_file_error("{", "is not JSON");
  expect_file_error("[]", "is not an object");
  expect_file_error("[1e400]", "beyond what float64 holds");
  const auto damaged_kernel = [&](const std::function<void(json&)>& damage) {
    return damaged([&](json& d) { damage(d["kernels"][0]); });
  };
  expect_file_error(damaged_kernel([](json& k) { k["call_latency_seconds"] = 1e308; }),
                    "kernels[0].call_latency_seconds is 1e+308, expected a number from 0 to 3600");
  expect_file_error(damaged([](json& d) { d["merge_bytes_per_second"] = 1e-300; }),
                    "merge_bytes_per_second is 1e-300");
  expect_file_error(damaged_kernel([](json& k) { k["rates"][0]["flops_per_second"] = 1e-300; }),
                    "kernels[0].rates[0].flops_per_second is 1e-300");
  expect_file_error(damaged([](json& d) { d["transports"]["mpi"][0]["seconds"] = 1e308; }),
                    "transports.mpi[0].seconds is 1e+308");
  expect_file_error(damaged([](json& d) { d["transports"]["mpi"][1]["bytes"] = 1e-300; }),
                    "transports.mpi takes more than 1 s per byte");
  expect_file_error(damaged([](json& d) { d.erase("source"); }), "source is missing");
  expect_file_error(damaged([](json& d) { d["speed"] = 1; }), "speed is no key");
  expect_file_error(damaged([](json& d) { d["version"] = 2; }),
                    "schema is \"annulus.cost_model\" version 2, expected \"annulus.cost_model\" "
                    "version 3, which annulus bench --calibrate writes");
  expect_file_error(damaged([](json& d) { d.erase("version"); }), "version null");
  expect_file_error(damaged([](json& d) { d["schema"] = "other"; }), "schema is \"other\"");
  expect_file_error(damaged_kernel([](json& k) { k["call_latency_seconds"] = "1"; }),
                    "kernels[0].call_latency_seconds is \"1\"");
  expect_file_error(damaged_kernel([](json& k) { k["dtype"] = "int7"; }),
                    "kernels[0].dtype is 'int7'");
  expect_file_error(damaged_kernel([](json& k) { k["mask"] = "fog"; }),
                    "kernels[0].mask is 'fog', expected one of none, band");
  expect_file_error(damaged_kernel([](json& k) { k["head_dim"] = 64.5; }),
                    "kernels[0].head_dim is 64.5, expected a whole number");
  expect_file_error(damaged_kernel([](json& k) { k["value_dim"] = 0; }),
                    "kernels[0].value_dim is 0");
  expect_file_error(damaged_kernel([](json& k) { k["soft_cap"] = 1; }),
                    "kernels[0].soft_cap is 1, expected a bool");
  expect_file_error(damaged_kernel([](json& k) { k["speed"] = 1; }), "kernels[0].speed is no key");
  expect_file_error(damaged([](json& d) { d["kernels"].push_back(d["kernels"][0]); }),
                    "kernels[1] is a second entry of native, bfloat16 D=64 Dv=64, mask band");
  expect_file_error(damaged([](json& d) { d["merge_bytes_per_second"] = 0; }),
                    "merge_bytes_per_second is 0");
  expect_file_error(damaged([](json& d) { d["kernels"] = json::object(); }),
                    "kernels is not a list");
  expect_file_error(damaged_kernel([](json& k) { k["rates"] = json::array(); }),
                    "kernels[0].rates has no point");
  expect_file_error(damaged_kernel([](json& k) { k["rates"] = 3; }),
                    "kernels[0].rates is not a list");
  expect_file_error(damaged_kernel([](json& k) { k["rates"][0].erase("rows"); }),
                    "kernels[0].rates[0].rows is missing");
  expect_file_error(damaged([](json& d) { d["transports"]["mpi"][1]["seconds"] = -1; }),
                    "transports.mpi[1].seconds is -1");
  expect_file_error(damaged([](json& d) { d["transports"]["mpi"][1]["bytes"] = 0; }),
                    "transports.mpi has size 0 at point 1");
  expect_file_error(damaged([](json& d) { d["transport"] = "pigeon"; }),
                    "transport is 'pigeon', which transports lacks");
}

}  // namespace
}  // namespace annulus::ring
