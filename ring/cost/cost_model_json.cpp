#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/ring/cost_model.hpp>

#include "json_file.hpp"

namespace annulus::ring {
namespace {

using nlohmann::json;

constexpr const char* kSchema = "annulus.cost_model";
constexpr int kVersion = 7;
// Older versions are read too. All kernels were forward kernels then, without a key for the pass.
constexpr int kVersionWithoutPass = 6;
constexpr int kVersionWithoutReading = 5;
constexpr const char* kReading = "read_bytes_per_second";
constexpr const char* kPass = "pass";

std::string_view name_of(Place::Kind device) {
  return device == Place::Kind::host ? "cpu" : "cuda";
}

Place::Kind parse_device(const std::string& name) {
  for (const Place::Kind device : {Place::Kind::host, Place::Kind::cuda}) {
    if (name == name_of(device)) return device;
  }
  throw ArgumentError("device", fmt::format("'{}'", name), "cpu or cuda");
}

/// The kernel name of the implementation of this name.
std::string parse_kernel(const std::string& name) {
  static const Registry registry = Registry::standard();
  std::vector<std::string> known;
  for (const auto& implementation : registry.implementations()) {
    const std::vector<std::string>& names = implementation->names();
    if (std::find(names.begin(), names.end(), name) != names.end()) {
      return implementation->kernel_name();
    }
    known.push_back(names.front());
  }
  throw ArgumentError("implementation", fmt::format("'{}'", name),
                      fmt::format("one of {}", fmt::join(known, ", ")));
}

/// The transports of ranks on this kind of device that have times of their own.
std::vector<std::string_view> transports_of(Place::Kind device) {
  if (device == Place::Kind::host) return {"mpi"};
  std::vector<std::string_view> names;
  for (const Transport transport : device_transports()) {
    if (transport_traits(transport).inside.empty()) names.push_back(name_of(transport));
  }
  return names;
}

/// The members of a class under their names.
json class_json(const ProblemClass& problem) {
  return {{"dtype", annulus::name_of(problem.dtype)},
          {"head_dim", problem.head_dim},
          {"value_dim", problem.value_dim},
          {"mask", name_of(problem.mask)},
          {"soft_cap", problem.soft_cap},
          {kPass, name_of(problem.pass)}};
}

json curve_json(const CostCurve& curve, const char* size, const char* value) {
  json points = json::array();
  for (const CostCurve::Point& point : curve.points()) {
    points.push_back({{size, point.size}, {value, point.value}});
  }
  return points;
}

/// Limits of a number, so that no prediction overflows.
struct Bounds {
  double least;
  double most;
};
constexpr Bounds kSizes{0, 0x1p63};
constexpr Bounds kDims{1, 0x1p31};
constexpr Bounds kRates{1, 1e30};  // per second
constexpr Bounds kLatencies{0, 3600};
constexpr Bounds kTransfers{1e-12, 3600};
constexpr Bounds kShares{0, 0.99};
constexpr double kSlowest = 1;  // seconds per byte

/// An object of the file, and its location: "transports.mpi[2]".
class Reader {
 public:
  Reader(const json& object, std::string where, const std::string& path)
      : object_(object), where_(std::move(where)), path_(path) {
    if (!object.is_object()) fail(where_.empty() ? "the file" : where_, "is not an object");
  }

  /// Throws unless the object has these keys and no others, apart from the `optional` one.
  void expect_keys(std::initializer_list<const char*> keys, std::string_view optional = {}) const {
    for (const char* key : keys) {
      if (!object_.contains(key)) fail(name(key), "is missing");
    }
    for (const auto& item : object_.items()) {
      bool known = !optional.empty() && item.key() == optional;
      for (const char* key : keys) known = known || item.key() == key;
      if (!known) fail(name(item.key()), "is not a key of a cost model");
    }
  }

  [[nodiscard]] bool has(const char* key) const { return object_.contains(key); }
  [[nodiscard]] const json& at(const char* key) const { return object_.at(key); }

  /// A number within the bounds.
  [[nodiscard]] double number(const char* key, Bounds bounds) const {
    const json& value = object_.at(key);
    const double given = value.is_number() ? value.get<double>() : -1;
    if (!(given >= bounds.least && given <= bounds.most)) {
      fail(name(key), fmt::format("is {}, expected a number from {} to {}", value.dump(),
                                  bounds.least, bounds.most));
    }
    return given;
  }

  [[nodiscard]] std::string text(const char* key) const {
    const json& value = object_.at(key);
    if (!value.is_string()) fail(name(key), fmt::format("is {}, expected a string", value.dump()));
    return value.get<std::string>();
  }

  [[nodiscard]] bool flag(const char* key) const {
    const json& value = object_.at(key);
    if (!value.is_boolean()) fail(name(key), fmt::format("is {}, expected a bool", value.dump()));
    return value.get<bool>();
  }

  [[nodiscard]] std::int64_t integer(const char* key, Bounds bounds) const {
    if (!object_.at(key).is_number_integer()) {
      fail(name(key), fmt::format("is {}, expected a whole number", object_.at(key).dump()));
    }
    return static_cast<std::int64_t>(number(key, bounds));
  }

  /// parse(text); the message quotes what its ArgumentError expected.
  template <class Parse>
  [[nodiscard]] auto parsed(const char* key, const Parse& parse) const {
    try {
      return parse(text(key));
    } catch (const ArgumentError& error) {
      fail(name(key), fmt::format("is {}, expected {}", error.value(), error.expected()));
    }
  }

  [[nodiscard]] CostCurve curve(const std::string& key, const char* size, const char* value,
                                Bounds bounds) const {
    const json& list = object_.at(key);
    if (!list.is_array()) fail(name(key), "is not a list of points");
    std::vector<CostCurve::Point> points;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const Reader point(list[i], fmt::format("{}[{}]", name(key), i), path_);
      point.expect_keys({size, value});
      points.push_back({point.number(size, kSizes), point.number(value, bounds)});
    }
    try {
      return {std::move(points), "points"};
    } catch (const ArgumentError& error) {
      fail(name(key), fmt::format("has {}, expected {}", error.value(), error.expected()));
    }
  }

  /// Seconds of messages by their bytes.
  [[nodiscard]] CostCurve messages(const std::string& key) const {
    const CostCurve hops = curve(key, "bytes", "seconds", kTransfers);
    if (!(hops.extended(kSizes.most) <= kSizes.most * kSlowest)) {
      fail(name(key), fmt::format("takes more than {} s per byte for large messages", kSlowest));
    }
    return hops.rising();
  }

  /// A list of some of these names.
  [[nodiscard]] std::set<std::string, std::less<>> names_among(
      const char* key, std::span<const std::string_view> known) const {
    const json& list = object_.at(key);
    if (!list.is_array()) fail(name(key), "is not a list of names");
    std::set<std::string, std::less<>> names;
    for (const json& entry : list) {
      if (!entry.is_string() ||
          std::find(known.begin(), known.end(), entry.get<std::string>()) == known.end()) {
        fail(name(key),
             fmt::format("has {}, expected any of {}", entry.dump(), fmt::join(known, ", ")));
      }
      names.insert(entry.get<std::string>());
    }
    return names;
  }

  [[noreturn]] void fail(const std::string& key, const std::string& problem) const {
    throw FileError(path_, key + " " + problem);
  }

 private:
  [[nodiscard]] std::string name(const std::string& key) const {
    return where_.empty() ? key : where_ + "." + key;
  }

  const json& object_;
  std::string where_;
  const std::string& path_;
};

/// An entry of the list of kernels.
void read_kernel(const json& entry, std::size_t index, bool has_pass, CostModel& model,
                 const std::string& path) {
  const Reader kernel(entry, fmt::format("kernels[{}]", index), path);
  kernel.expect_keys({"implementation", "dtype", "head_dim", "value_dim", "mask", "soft_cap",
                      "source", "call_latency_seconds", "rates"},
                     has_pass ? kPass : "");
  const ProblemClass problem{kernel.parsed("dtype", parse_dtype),
                             kernel.integer("head_dim", kDims),
                             kernel.integer("value_dim", kDims),
                             kernel.parsed("mask", parse_mask_kind),
                             kernel.flag("soft_cap"),
                             kernel.has(kPass) ? kernel.parsed(kPass, parse_pass) : Pass::forward};
  const std::string implementation = kernel.parsed("implementation", parse_kernel);
  const bool fresh =
      model.kernels[implementation]
          .emplace(problem, KernelCost{kernel.text("source"),
                                       kernel.curve("rates", "rows", "flops_per_second", kRates),
                                       kernel.number("call_latency_seconds", kLatencies)})
          .second;
  if (!fresh) {
    kernel.fail(fmt::format("kernels[{}]", index),
                fmt::format("is a second entry of {}, {}", implementation, to_string(problem)));
  }
}

}  // namespace

std::string to_json(const CostModel& model) {
  json kernels = json::array();
  for (const auto& [implementation, classes] : model.kernels) {
    for (const auto& [problem, cost] : classes) {
      json entry = class_json(problem);
      entry["implementation"] = implementation;
      entry["source"] = cost.source;
      entry["call_latency_seconds"] = cost.call_latency;
      entry["rates"] = curve_json(cost.rate, "rows", "flops_per_second");
      kernels.push_back(std::move(entry));
    }
  }
  json transports = json::object();
  for (const auto& [name, curve] : model.transports) {
    transports[name] = curve_json(curve, "bytes", "seconds");
  }
  json data{{"schema", kSchema},
            {"version", kVersion},
            {"source", model.source},
            {"device", name_of(model.device)},
            {"kernels", kernels},
            {"merge_bytes_per_second", model.merge_bytes_per_second},
            {"transport", model.transport},
            {"transports", transports},
            {"transfer_share", model.transfer_share},
            {"network_hops", curve_json(model.network, "bytes", "seconds")},
            {"node_bytes_per_second", model.node_bytes_per_second},
            {"launch_seconds", model.launch_seconds},
            {"assumed", model.assumed}};
  if (model.read_bytes_per_second) data[kReading] = *model.read_bytes_per_second;
  return data.dump(2);
}

CostModel parse_cost_model(std::string_view text, const std::string& path) {
  const json data = parse_json_file(text, path);
  const Reader file(data, "", path);
  // Checked first, since files of other versions have other keys.
  const json schema = data.value("schema", json());
  const json version = data.value("version", json());
  const bool knows_pass = version == kVersion;
  const bool knows_reading = knows_pass || version == kVersionWithoutPass;
  if (schema != kSchema || !(knows_reading || version == kVersionWithoutReading)) {
    file.fail("schema",
              fmt::format("is {} version {}, expected \"{}\" version {}, which annulus bench "
                          "--calibrate writes where there is no file (delete this one, or name "
                          "another), {} or {}",
                          schema.dump(), version.dump(), kSchema, kVersion, kVersionWithoutPass,
                          kVersionWithoutReading));
  }
  file.expect_keys({"schema", "version", "source", "device", "kernels", "merge_bytes_per_second",
                    "transport", "transports", "transfer_share", "network_hops",
                    "node_bytes_per_second", "launch_seconds", "assumed"},
                   knows_reading ? kReading : "");
  CostModel model;
  model.source = file.text("source");
  model.device = file.parsed("device", parse_device);
  const json& kernels = file.at("kernels");
  if (!kernels.is_array()) file.fail("kernels", "is not a list");
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    read_kernel(kernels[i], i, knows_pass, model, path);
  }
  model.merge_bytes_per_second = file.number("merge_bytes_per_second", kRates);
  if (file.has(kReading)) model.read_bytes_per_second = file.number(kReading, kRates);
  const Reader transports(file.at("transports"), "transports", path);
  const std::vector<std::string_view> possible = transports_of(model.device);
  for (const auto& item : file.at("transports").items()) {
    if (std::find(possible.begin(), possible.end(), item.key()) == possible.end()) {
      file.fail("transports." + item.key(),
                fmt::format("is not a transport of device {}, expected {}", name_of(model.device),
                            fmt::join(possible, " or ")));
    }
    model.transports.emplace(item.key(), transports.messages(item.key()));
  }
  model.transfer_share = file.number("transfer_share", kShares);
  model.network = file.messages("network_hops");
  model.node_bytes_per_second = file.number("node_bytes_per_second", kRates);
  model.launch_seconds = file.number("launch_seconds", kLatencies);
  model.assumed = file.names_among("assumed", CostModel::kAssumable);
  model.transport = file.text("transport");
  if (!model.knows(model.transport)) {
    file.fail("transport", fmt::format("is '{}', which transports lacks", model.transport));
  }
  return model;
}

}  // namespace annulus::ring
