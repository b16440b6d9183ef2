#pragma once

#include <cstdint>

namespace annulus::flash::backward {

/// A warp's 16 keys and some queries. Score 4i + 2h + e of a thread belongs to query 8i + 2 (lane %
/// 4) + e and key lane / 4 + 8h.
struct WarpScores {
  std::int32_t batch, head;
  std::int32_t column;  ///< the first one
  int lane;
  unsigned char* own;  ///< shared memory of the warp: see kDropped
};

}  // namespace annulus::flash::backward
