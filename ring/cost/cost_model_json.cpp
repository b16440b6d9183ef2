#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <set>
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
#include <annulus/mesh/transport_traits.hpp>
#include <annulus/ring/cost_model.hpp>

#include "json_object.hpp"

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
constexpr const char* kThreads = "threads";
constexpr std::int64_t kMaximumThreads = 4096;

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

constexpr std::int64_t kMaximumDim = std::int64_t{1} << 31;

/// Limits of a number, so that no prediction overflows.
struct Bounds {
  double least;
  double most;
};
constexpr Bounds kSizes{0, 0x1p63};
constexpr Bounds kRates{1, 1e30};  // per second
constexpr Bounds kLatencies{0, 3600};
constexpr Bounds kTransfers{1e-12, 3600};
constexpr Bounds kShares{0, 0.99};
constexpr double kSlowest = 1;  // seconds per byte

double number(const JsonObject& object, const char* key, Bounds bounds) {
  return object.number(key, bounds.least, bounds.most);
}

CostCurve curve(const JsonObject& object, const std::string& key, const char* size,
                const char* value, Bounds bounds) {
  std::vector<CostCurve::Point> points;
  object.each(key, " of points", [&](const json& entry, const std::string& where) {
    const JsonObject point(entry, where, object.path());
    point.expect_no_others({size, value});
    points.push_back({number(point, size, kSizes), number(point, value, bounds)});
  });
  try {
    return {std::move(points), "points"};
  } catch (const ArgumentError& error) {
    object.fail(object.name(key),
                fmt::format("has {}, expected {}", error.value(), error.expected()));
  }
}

/// Seconds of messages by their bytes.
CostCurve messages(const JsonObject& object, const std::string& key) {
  const CostCurve hops = curve(object, key, "bytes", "seconds", kTransfers);
  if (!(hops.extended(kSizes.most) <= kSizes.most * kSlowest)) {
    object.fail(object.name(key),
                fmt::format("takes more than {} s per byte for large messages", kSlowest));
  }
  return hops.rising();
}

/// The names of parts of the model that are only assumed.
std::set<std::string, std::less<>> assumed_parts(const JsonObject& file) {
  std::set<std::string, std::less<>> names;
  file.each("assumed", " of names", [&](const json& entry, const std::string& /*where*/) {
    if (!entry.is_string() || std::ranges::find(CostModel::kAssumable, entry.get<std::string>()) ==
                                  std::end(CostModel::kAssumable)) {
      file.fail("assumed", fmt::format("has {}, expected any of {}", entry.dump(),
                                       fmt::join(CostModel::kAssumable, ", ")));
    }
    names.insert(entry.get<std::string>());
  });
  return names;
}

/// An entry of the list of kernels.
void read_kernel(const JsonObject& kernel, const std::string& where, bool has_pass,
                 CostModel& model) {
  kernel.expect_no_others({"implementation", "dtype", "head_dim", "value_dim", "mask", "soft_cap",
                           "source", "call_latency_seconds", "rates", has_pass ? kPass : "source"});
  const ProblemClass problem{kernel.parsed("dtype", parse_dtype),
                             kernel.integer("head_dim", 1, kMaximumDim),
                             kernel.integer("value_dim", 1, kMaximumDim),
                             kernel.parsed("mask", parse_mask_kind),
                             kernel.flag("soft_cap"),
                             kernel.has(kPass) ? kernel.parsed(kPass, parse_pass) : Pass::forward};
  const std::string implementation = kernel.parsed("implementation", parse_kernel);
  const bool fresh =
      model.kernels[implementation]
          .emplace(problem, KernelCost{kernel.text("source"),
                                       curve(kernel, "rates", "rows", "flops_per_second", kRates),
                                       number(kernel, "call_latency_seconds", kLatencies)})
          .second;
  if (!fresh) {
    kernel.fail(where,
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
  if (model.device == Place::Kind::host && model.threads > 0) data[kThreads] = model.threads;
  return data.dump(2);
}

CostModel parse_cost_model(std::string_view text, const std::string& path) {
  const json data = parse_json_file(text, path);
  const JsonObject file(data, "", path);
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
  file.expect_no_others({"schema", "version", "source", "device", "kernels",
                         "merge_bytes_per_second", "transport", "transports", "transfer_share",
                         "network_hops", "node_bytes_per_second", "launch_seconds", "assumed",
                         kThreads, knows_reading ? kReading : "source"});
  CostModel model;
  model.source = file.text("source");
  model.device = file.parsed("device", parse_device);
  file.each("kernels", "", [&](const json& entry, const std::string& where) {
    read_kernel({entry, where, path}, where, knows_pass, model);
  });
  model.merge_bytes_per_second = number(file, "merge_bytes_per_second", kRates);
  if (file.has(kReading)) model.read_bytes_per_second = number(file, kReading, kRates);
  model.threads =
      file.has(kThreads) ? static_cast<int>(file.integer(kThreads, 1, kMaximumThreads)) : 0;
  const JsonObject transports = file.object("transports");
  const std::vector<std::string_view> possible = transports_of(model.device);
  for (const auto& item : file.at("transports").items()) {
    if (std::find(possible.begin(), possible.end(), item.key()) == possible.end()) {
      file.fail("transports." + item.key(),
                fmt::format("is not a transport of device {}, expected {}", name_of(model.device),
                            fmt::join(possible, " or ")));
    }
    model.transports.emplace(item.key(), messages(transports, item.key()));
  }
  model.transfer_share = number(file, "transfer_share", kShares);
  model.network = messages(file, "network_hops");
  model.node_bytes_per_second = number(file, "node_bytes_per_second", kRates);
  model.launch_seconds = number(file, "launch_seconds", kLatencies);
  model.assumed = assumed_parts(file);
  model.transport = file.text("transport");
  if (!model.knows(model.transport)) {
    file.fail("transport", fmt::format("is '{}', which transports lacks", model.transport));
  }
  return model;
}

}  // namespace annulus::ring
