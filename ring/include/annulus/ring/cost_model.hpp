#pragma once

#include <cstdint>
#include <string>

namespace annulus::ring {

/// Rates that turn a plan into time. They are assumptions: `source` says whose.
struct CostModel {
  double flops_per_second = 0;           ///< of the local kernel on one rank
  double transfer_bytes_per_second = 0;  ///< of one rank, sending and receiving at once
  double transfer_latency = 0;           ///< seconds per message
  double merge_bytes_per_second = 0;     ///< memory rate of merging partial results
  double call_latency = 0;               ///< seconds per kernel call
  std::string source;

  /// One CPU core of today per rank with shared memory between ranks.
  static CostModel cpu_core();
};

}  // namespace annulus::ring
