#pragma once

namespace annulus::launcher {

/// Work that moves bytes through memory.
struct MemoryTime {
  double bytes = 0;
  double seconds = 0;
};

/// Bytes per second, from the difference of two times, so that calls do not count; from the larger
/// work alone if it does not take longer.
inline double memory_rate(const MemoryTime& small, const MemoryTime& large) {
  return large.seconds > small.seconds
             ? (large.bytes - small.bytes) / (large.seconds - small.seconds)
             : large.bytes / large.seconds;
}

}  // namespace annulus::launcher
