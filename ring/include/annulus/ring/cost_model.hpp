#pragma once

#include <map>
#include <string>
#include <string_view>

#include <annulus/core/place.hpp>
#include <annulus/ring/cost_curve.hpp>

namespace annulus::ring {

/// Rates that turn a plan into time: assumed, or measured on a machine (annulus bench --calibrate).
/// `source` says which.
struct CostModel {
  std::string source;
  /// Operations per second of each implementation's kernel on one rank, by the rows of the block.
  /// An implementation that is missing counts with its own assumed_rate().
  std::map<std::string, CostCurve> kernels;
  double call_latency = 0;            ///< seconds per kernel call
  double merge_bytes_per_second = 1;  ///< memory rate of merging partial results
  /// Seconds of a message by its bytes, for each transport ("mpi", "nccl", "peer"), while the rank
  /// sends one and receives one.
  std::map<std::string, CostCurve> transports;
  std::string transport;  ///< the one in use

  /// One current CPU core per rank, shared memory between ranks.
  static CostModel cpu_core();
  /// One Hopper GPU per rank, NVLink between ranks, half-precision kernels.
  static CostModel hopper_nvlink();
  /// Whichever of the two suits ranks at this place better.
  static CostModel for_place(Place place);

  /// Throws ArgumentError when the model does not know the transport.
  void use_transport(std::string_view name);
  /// Seconds of one call of an implementation, of `flops` operations on a block of `rows` rows.
  /// Throws InternalError for one that is not in `kernels`.
  [[nodiscard]] double kernel_seconds(const std::string& implementation, double flops,
                                      double rows) const;
  /// Seconds of combining or copying, by the bytes that are read and written.
  [[nodiscard]] double memory_seconds(double bytes) const { return bytes / merge_bytes_per_second; }
  /// Seconds of one message by the transport in use.
  [[nodiscard]] double transfer_seconds(double bytes) const;
};

/// JSON of a model, every number exact:
///
///     {"schema": "annulus.cost_model", "version": 2, "source": "…",
///      "kernels": {"native": [{"rows": 1024, "flops_per_second": 1e11}, …]},
///      "call_latency_seconds": 1e-6, "merge_bytes_per_second": 8e9, "transport": "mpi",
///      "transports": {"mpi": [{"bytes": 65536, "seconds": 2e-5}, …]}}
[[nodiscard]] std::string to_json(const CostModel& model);
/// Reads it back. Throws FileError, naming `path` and the key, if a value is missing, unknown, of
/// the wrong type, or so large or small that predictions would overflow (a latency above an hour, a
/// rate below 1 per second); also for another schema or version.
[[nodiscard]] CostModel parse_cost_model(std::string_view text, const std::string& path);

}  // namespace annulus::ring
