#pragma once

#include <map>
#include <string>
#include <string_view>

#include <annulus/attention/problem_class.hpp>
#include <annulus/core/place.hpp>
#include <annulus/ring/cost_curve.hpp>

namespace annulus::ring {

/// What calls of one implementation cost for problems of one class.
struct KernelCost {
  std::string source;       ///< how it is known: of which problem it was measured
  CostCurve rate;           ///< operations per second, by the rows of the block
  double call_latency = 0;  ///< seconds that a call takes besides

  /// Of one call, of `flops` operations on a block of `rows` rows.
  [[nodiscard]] double seconds(double flops, double rows) const {
    return call_latency + flops / rate.clamped(rows);
  }
  bool operator==(const KernelCost&) const = default;
};

/// What is known of a machine's speed: assumed, or measured there (annulus bench --calibrate).
/// prices.hpp applies it to a problem.
struct CostModel {
  /// "assumed: …", or "measured: …", which names the machine and the ranks.
  std::string source;
  /// What was measured, by the implementation's name. Everything else counts with assumed_rate().
  std::map<std::string, std::map<ProblemClass, KernelCost>> kernels;
  double merge_bytes_per_second = 1;  ///< memory rate of merging partial results
  /// Seconds of a message by its bytes, for each transport ("mpi", "nccl", "peer"), while the rank
  /// sends one and receives one.
  std::map<std::string, CostCurve> transports;
  std::string transport;  ///< the one in use

  /// One current CPU core per rank, shared memory between ranks.
  static CostModel cpu_core();
  /// One Hopper GPU per rank, NVLink between ranks.
  static CostModel hopper_nvlink();
  /// Whichever of the two suits ranks at this place better.
  static CostModel for_place(Place place);

  /// Throws ArgumentError("cost model", …) unless its source is this one: figures of different
  /// machines do not mix.
  void check_source(std::string_view expected) const;
  /// Replaces what `newer`, of the same source, has measured too, and adds what it has measured
  /// besides. The rest stays. Throws as check_source() does.
  void refresh(const CostModel& newer);
  /// Throws ArgumentError when the model does not know the transport.
  void use_transport(std::string_view name);
  /// Seconds of combining or copying, by the bytes that are read and written.
  [[nodiscard]] double memory_seconds(double bytes) const { return bytes / merge_bytes_per_second; }
  /// Seconds of one message by the transport in use.
  [[nodiscard]] double transfer_seconds(double bytes) const;
};

/// JSON of a model, every number exact:
///
///     {"schema": "annulus.cost_model", "version": 3, "source": "…",
///      "kernels": [{"implementation": "native", "dtype": "float32", "head_dim": 64,
///                   "value_dim": 64, "mask": "band", "soft_cap": false, "source": "…",
///                   "call_latency_seconds": 1e-6,
///                   "rates": [{"rows": 1024, "flops_per_second": 1e11}, …]}, …],
///      "merge_bytes_per_second": 8e9, "transport": "mpi",
///      "transports": {"mpi": [{"bytes": 65536, "seconds": 2e-5}, …]}}
[[nodiscard]] std::string to_json(const CostModel& model);
/// Reads it back. Throws FileError, naming `path` and the key, if a value is missing, unknown, of
/// the wrong type, or so large or small that predictions would overflow (a latency above an hour, a
/// rate below 1 per second); if a class comes twice; also for another schema or version.
[[nodiscard]] CostModel parse_cost_model(std::string_view text, const std::string& path);

}  // namespace annulus::ring
