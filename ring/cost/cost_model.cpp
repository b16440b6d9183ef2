#include <algorithm>
#include <string>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>
#include <annulus/ring/cost_model.hpp>

namespace annulus::ring {
namespace {

constexpr double kMiB = 1 << 20;
// For reading rates that were not measured: kernels on GPUs read at 4.4 TB/s, while merges, which
// write as well, move 3.3 TB/s.
constexpr double kReadingOnGpus = 0.75;

// The key in CostModel::transports for messages inside a node; empty for an unknown transport.
std::string key_of(std::string_view transport) {
  for (const TransportTraits* traits : transports()) {
    if (traits->name == transport) return std::string(traits->inside_node());
  }
  return {};
}

std::string assumed_cores(int threads) {
  return threads == 1 ? "assumed: one CPU core per rank"
                      : fmt::format("assumed: {} CPU threads per rank", threads);
}

}  // namespace

std::string_view name_of(Knowledge knowledge) noexcept {
  switch (knowledge) {
    case Knowledge::measured:
      return "measured";
    case Knowledge::nearest:
      return "nearest";
    case Knowledge::assumed:
      return "assumed";
  }
  return "?";
}

CostModel CostModel::cpu_core() {
  return {.source = assumed_cores(1) + ", ranks of one node",
          .device = Place::Kind::host,
          .kernels = {},
          .merge_bytes_per_second = 8e9,
          .transports = {{"mpi", CostCurve::transfer(2e-6, 3e9)}},
          .transport = "mpi",
          .network = CostCurve::transfer(30e-6, 1.1e9),
          .node_bytes_per_second = 1.1e9};
}

// Round figures of H200 GPUs, four of them in a ring.
CostModel CostModel::hopper_nvlink() {
  const CostCurve copy_engine({{kMiB / 16, 0.017e-3},
                               {1 * kMiB, 0.022e-3},
                               {8 * kMiB, 0.042e-3},
                               {32 * kMiB, 0.110e-3},
                               {64 * kMiB, 0.199e-3},
                               {256 * kMiB, 0.738e-3}},
                              "peer");
  const CostCurve nccl({{1 * kMiB, 1 * kMiB / 38e9},
                        {8 * kMiB, 8 * kMiB / 123e9},
                        {64 * kMiB, 64 * kMiB / 162e9},
                        {256 * kMiB, 256 * kMiB / 300e9}},
                       "nccl");
  return {.source = "assumed: one H200 per rank, NVLink",
          .device = Place::Kind::cuda,
          .kernels = {},
          .merge_bytes_per_second = 3.3e12,
          .transports = {{"nccl", nccl}, {"peer", copy_engine}},
          .transport = "peer",
          .transfer_share = 0.12,  // NCCL's 16 channels of 132 multiprocessors
          .network = CostCurve::transfer(25e-6, 45e9),
          .node_bytes_per_second = 8 * 45e9,
          .launch_seconds = 8e-6};  // as measured times of ulysses and decoding say
}

CostModel CostModel::for_device(Place::Kind device) {
  return device == Place::Kind::host ? cpu_core() : hopper_nvlink();
}

void CostModel::check_place(Place place) const {
  if (place.kind == device) return;
  const auto ranks = [](Place::Kind kind) {
    return kind == Place::Kind::host ? "CPU ranks" : "GPU ranks";
  };
  throw ArgumentError("cost model", fmt::format("one of {} ({})", ranks(device), source),
                      fmt::format("one of {}", ranks(place.kind)));
}

void CostModel::check_source(std::string_view expected) const {
  if (source == expected) return;
  throw ArgumentError(
      "cost model", fmt::format("'{}'", source),
      fmt::format("'{}', or another file: figures of different machines do not mix", expected));
}

void CostModel::refresh(const CostModel& newer, bool prefers) {
  check_source(newer.source);
  for (const auto& [implementation, classes] : newer.kernels) {
    for (const auto& [problem, cost] : classes) {
      kernels[implementation].insert_or_assign(problem, cost);
    }
  }
  merge_bytes_per_second = newer.merge_bytes_per_second;
  if (newer.read_bytes_per_second) read_bytes_per_second = newer.read_bytes_per_second;
  if (newer.assumed.contains("transports")) {
    transports.insert(newer.transports.begin(), newer.transports.end());
  } else {
    for (const auto& [name, curve] : newer.transports) transports.insert_or_assign(name, curve);
    assumed.erase("transports");
  }
  if (prefers) transport = newer.transport;
  threads = newer.threads;
  const auto take = [&](const char* name, auto CostModel::*field) {
    if (newer.assumed.contains(name)) return;
    this->*field = newer.*field;
    assumed.erase(name);
  };
  take("transfer_share", &CostModel::transfer_share);
  take("network_hops", &CostModel::network);
  take("node_bytes_per_second", &CostModel::node_bytes_per_second);
  take("launch_seconds", &CostModel::launch_seconds);
}

bool CostModel::knows(std::string_view name) const {
  return transports.contains(key_of(name));
}

void CostModel::use_transport(std::string_view name) {
  if (!knows(name)) {
    std::string known;
    for (const auto& entry : transports) known += (known.empty() ? "" : ", ") + entry.first;
    throw ArgumentError(fmt::format("transport of the cost model ({})", source),
                        fmt::format("'{}'", name), "one that it knows: " + known);
  }
  transport = name;
}

void CostModel::use_threads(int count) {
  if (device != Place::Kind::host || count == threads) return;
  if (const std::string before = assumed_cores(threads); source.starts_with(before)) {
    source.replace(0, before.size(), assumed_cores(count));
  } else if (threads > 0) {
    source += fmt::format("; kernels scaled from {} to {} threads", threads, count);
  }
  for (auto& [name, classes] : kernels) {
    if (threads == 0) break;
    for (auto& [problem, cost] : classes) {
      cost.rate = cost.rate.scaled(static_cast<double>(count) / threads);
    }
  }
  threads = count;
}

void CostModel::adopt_transport(std::string_view name) {
  const std::string adopted = key_of(name);
  if (!transports.contains(adopted)) {
    const CostModel defaults = for_device(device);
    const auto known = defaults.transports.find(adopted);
    const bool sends = known != defaults.transports.end();  // a group of one rank sends nothing
    transports.emplace(adopted, sends ? known->second : messages(false));
    if (sends) source += fmt::format("; assumed: messages by {}", adopted);
  }
  transport = name;
}

double CostModel::reading_seconds(double bytes) const {
  if (read_bytes_per_second) return bytes / *read_bytes_per_second;
  return memory_seconds(bytes) * (device == Place::Kind::host ? 1 : kReadingOnGpus);
}

const CostCurve& CostModel::messages(bool across) const {
  if (across) return network;
  const auto found = transports.find(key_of(transport));
  if (found == transports.end()) {
    throw InternalError(fmt::format("cost model without a curve of transport '{}'", transport));
  }
  return found->second;
}

double CostModel::transfer_seconds(std::span<const double> messages, bool across) const {
  const CostCurve& curve = this->messages(across);
  if (messages.empty()) return 0;
  const double shared = transport_traits(transport).starts_once ? curve.at_zero() : 0;
  double seconds = shared;
  double bytes = 0;
  for (const double message : messages) {
    seconds += std::max(0.0, curve.extended(message) - shared);
    bytes += message;
  }
  return std::max(seconds, curve.extended(bytes));
}

}  // namespace annulus::ring
