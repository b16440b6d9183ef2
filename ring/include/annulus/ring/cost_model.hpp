#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include <annulus/attention/implementation.hpp>
#include <annulus/attention/problem_class.hpp>
#include <annulus/core/place.hpp>
#include <annulus/ring/cost_curve.hpp>

namespace annulus::ring {

/// The source of a kernel's cost: measured for the problem's class, derived from the nearest
/// measured class, or assumed.
enum class Knowledge : std::uint8_t { measured, nearest, assumed };

[[nodiscard]] std::string_view name_of(Knowledge knowledge) noexcept;

/// The cost of one implementation's calls for problems of one class.
struct KernelCost {
  std::string source;       ///< the problem that it was measured on, or why it is assumed
  CostCurve rate;           ///< operations per second of the whole device, by the rows of a block
  double call_latency = 0;  ///< seconds that each call takes in addition
  Knowledge knowledge = Knowledge::measured;
  std::int64_t row_tile = 1;       ///< see Declaration
  bool joins_query_heads = false;  ///< see BackwardDeclaration
  FewRows few_rows = {};           ///< see Implementation

  /// Seconds of a call: `flops` operations on a block of `rows` rows at `share` of the device's
  /// rate (see used_share()), while memory is busy for `memory` seconds.
  [[nodiscard]] double seconds(double flops, double rows, double share, double memory) const {
    return call_latency + std::max(flops / (rate.clamped(rows) * share), memory);
  }
  bool operator==(const KernelCost&) const = default;
};

/// A machine's speed, assumed or measured (annulus bench --calibrate). prices.hpp applies it to a
/// problem.
struct CostModel {
  /// "assumed: …", or "measured: …", which names the machine and the ranks.
  std::string source;
  Place::Kind device = Place::Kind::host;  ///< what the ranks compute on
  /// Measured costs, by the name of the kernel (Implementation::kernel_name). For other kernels,
  /// assumed_rate() is used.
  std::map<std::string, std::map<ProblemClass, KernelCost>> kernels;
  double merge_bytes_per_second = 1;  ///< for merging partial results
  /// Rate at which kernels for few rows read keys and values; absent: derived from merging.
  std::optional<double> read_bytes_per_second = {};
  /// Seconds of a message by its bytes, for each transport ("mpi" between CPUs, "nccl" and "peer"
  /// between GPUs), while the rank sends one and receives one. More bytes never take less time.
  /// Transport "composite" has none of its own: see TransportTraits::inside_node().
  std::map<std::string, CostCurve> transports;
  std::string transport;  ///< the one in use
  /// The share of its computing speed that a rank loses while messages move, if the transport runs
  /// on multiprocessors.
  double transfer_share = 0;
  /// Seconds of a message to another node, while the rank sends one and receives one, and the other
  /// ranks of its node send none. More bytes never take less time.
  CostCurve network = CostCurve::transfer(20e-6, 45e9);
  /// The most that all ranks of a node together send to other nodes; they receive as much.
  double node_bytes_per_second = 360e9;
  /// Seconds that a launch of copies, or of a reduction, takes besides its bytes.
  double launch_seconds = 0;
  /// CPU threads of a rank, which its kernels share: see use_threads(). 0: not known.
  int threads = 1;
  /// The keys that may be assumed instead of measured.
  static constexpr std::array<std::string_view, 5> kAssumable{
      "transports", "transfer_share", "network_hops", "node_bytes_per_second", "launch_seconds"};
  std::set<std::string, std::less<>> assumed{kAssumable.begin(), kAssumable.end()};

  /// One current CPU core per rank, shared memory between ranks, 10 Gb/s Ethernet between nodes.
  /// use_threads() gives ranks more cores.
  static CostModel cpu_core();
  /// One Hopper GPU per rank, NVLink between ranks; between nodes, a link of 400 Gb/s per GPU, of
  /// which a node has eight.
  static CostModel hopper_nvlink();
  /// The assumed model for ranks on this kind of device.
  static CostModel for_device(Place::Kind device);
  static CostModel for_place(Place place) { return for_device(place.kind); }
  bool operator==(const CostModel&) const = default;

  /// Throws ArgumentError("cost model", …) unless the model is for ranks at this kind of place.
  void check_place(Place place) const;
  /// Throws ArgumentError("cost model", …) unless the model's source is `expected`: figures of
  /// different machines must not mix.
  void check_source(std::string_view expected) const;
  /// Takes over all measurements of `newer`, which must have the same source; the rest stays. With
  /// `prefers`, also takes over its transport in use. Throws as check_source() does.
  void refresh(const CostModel& newer, bool prefers);
  /// True if the model has times of this transport, or of the one that carries its messages inside
  /// a node.
  [[nodiscard]] bool knows(std::string_view name) const;
  /// Throws ArgumentError when the model does not know the transport.
  void use_transport(std::string_view name);
  /// Adapts the model to ranks with this many CPU threads: the rates of kernels change in
  /// proportion, the rates of memory do not. Does nothing for GPUs.
  void use_threads(int count);
  /// Uses the ranks' transport. If the model has no times of it, assumes some and says so in
  /// `source`.
  void adopt_transport(std::string_view name);
  /// Seconds to combine or copy, by the bytes read and written.
  [[nodiscard]] double memory_seconds(double bytes) const { return bytes / merge_bytes_per_second; }
  /// Seconds for a kernel to read this many bytes.
  [[nodiscard]] double reading_seconds(double bytes) const;
  /// Seconds of a message, by its bytes, in the transport in use: to another node (`across`) or
  /// inside one.
  [[nodiscard]] const CostCurve& messages(bool across) const;
  [[nodiscard]] double transfer_seconds(double bytes, bool across = false) const {
    return transfer_seconds({&bytes, 1}, across);
  }
  /// Seconds of messages that are sent together, by the bytes of each: the sum of their times, but
  /// a transport that starts them together pays for the start once. Never less than one message of
  /// all their bytes.
  [[nodiscard]] double transfer_seconds(std::span<const double> messages,
                                        bool across = false) const;
};

/// JSON of a model, every number exact:
///
///     {"schema": "annulus.cost_model", "version": 7, "source": "…", "device": "cpu",
///      "kernels": [{"implementation": "native", "dtype": "float32", "head_dim": 64,
///                   "value_dim": 64, "mask": "band", "soft_cap": false, "pass": "forward",
///                   "source": "…", "call_latency_seconds": 1e-6,
///                   "rates": [{"rows": 1024, "flops_per_second": 1e11}, …]}, …],
///      "merge_bytes_per_second": 8e9, "read_bytes_per_second": 9e9, "transport": "mpi",
///      "transports": {"mpi": [{"bytes": 65536, "seconds": 2e-5}, …]}, "transfer_share": 0.1,
///      "network_hops": [{"bytes": 65536, "seconds": 1e-4}, …], "node_bytes_per_second": 1.2e9,
///      "launch_seconds": 5e-6, "threads": 4, "assumed": ["network_hops", …]}
[[nodiscard]] std::string to_json(const CostModel& model);
/// Reads the text back. "threads" may be absent. Files of versions 6 and 5 are read too: their
/// kernels have no "pass" and belong to the forward pass, and files of version 5 have no
/// read_bytes_per_second. The curves of messages are read as CostCurve::rising(). Throws FileError,
/// naming `path` and the key, for another schema or version, a class that comes twice, and a value
/// that is missing, unknown (including implementations, and transports that the device does not
/// use), of the wrong type, or so large or small that predictions would overflow (a latency above
/// an hour, a rate below 1 per second).
[[nodiscard]] CostModel parse_cost_model(std::string_view text, const std::string& path);

}  // namespace annulus::ring
