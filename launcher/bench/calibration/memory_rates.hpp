#pragma once

#include <functional>
#include <optional>
#include <string>

#include <annulus/core/device.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/control.hpp>

namespace annulus::launcher {

/// Times body(calls) and returns the seconds of a call.
using SecondsOfCall = std::function<double(const std::function<void(int calls)>& body)>;

/// Bytes per second of merging two large results into a third, as a reduction counts them: two
/// read, one written. Each has 256 MiB on a GPU, which caches some 50 MB, and 64 MiB on a CPU,
/// where a larger cache would make it too fast. The time of an eighth of that is subtracted.
/// Collective over `world`.
[[nodiscard]] double measure_merge_rate(Control& world, Device& device, const Watchdog& watchdog,
                                        const SecondsOfCall& seconds_of);

/// A rate, or the reason why there is none.
struct ReadRate {
  std::optional<double> bytes_per_second;
  std::string text;  ///< the implementation that read, or the reason
};

/// Bytes per second of reading keys and values, 512 MiB on a GPU and 128 MiB on a CPU: for one
/// query row, by a kernel for few rows (Implementation::few_rows), or by the first implementation
/// if there is none. The time of a quarter of that is subtracted. Collective over `world`.
[[nodiscard]] ReadRate measure_read_rate(Control& world, Device& device, const Watchdog& watchdog,
                                         int threads, const SecondsOfCall& seconds_of);

}  // namespace annulus::launcher
