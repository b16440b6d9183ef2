#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <annulus/core/device.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/ring/cost_curve.hpp>

#include "launcher/bench/timing.hpp"
#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// The times of hops by one transport: every rank sends to the next one and receives as much from
/// the previous one, with nothing else running.
struct TransportHops {
  struct Hop {
    std::int64_t bytes = 0;
    Timing time;  ///< of the slowest rank
  };
  std::string transport;
  std::string skipped;  ///< why it could not be measured; empty if it was
  std::vector<Hop> hops;

  /// Median seconds by bytes.
  [[nodiscard]] ring::CostCurve curve() const;
};

/// Times the hops of a ring along these axes of the mesh, all such rings at once. Uses the named
/// transport; for automatic, each distinct transport for memory of `device`. Collective over the
/// mesh. Throws ArgumentError for rings of one rank.
[[nodiscard]] std::vector<TransportHops> measure_hops(Mesh& mesh, const AxisNames& axes,
                                                      Device& device, Transport asked,
                                                      const SweepRange& sizes, int warmup,
                                                      int iterations);
/// All axes of the mesh: a ring over all its ranks.
[[nodiscard]] AxisNames all_axes(const Mesh& mesh);

}  // namespace annulus::launcher
