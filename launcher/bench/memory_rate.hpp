#pragma once

namespace annulus::launcher {

/// Work that moves bytes through memory.
struct MemoryTime {
  double bytes = 0;
  double seconds = 0;
};

/// Bytes per second: what the larger of two takes longer, so that calls do not count; where the
/// larger takes no longer, those of the larger alone.
inline double memory_rate(const MemoryTime& small, const MemoryTime& large) {
  return large.seconds > small.seconds
             ? (large.bytes - small.bytes) / (large.seconds - small.seconds)
             : large.bytes / large.seconds;
}

}  // namespace annulus::launcher
