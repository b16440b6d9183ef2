#pragma once

#include <functional>
#include <optional>
#include <string>

#include <annulus/core/device.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/control.hpp>

namespace annulus::launcher {

/// A rate, or the reason why there is none.
struct ReadRate {
  std::optional<double> bytes_per_second;
  std::string text;  ///< the implementation that read, or the reason
};

/// Bytes per second of reading keys and values, 512 MiB on a GPU and 128 MiB on a CPU: for one
/// query row, by a kernel for few rows (Implementation::few_rows), or by the first implementation
/// if there is none. The time of a quarter of that is subtracted. `seconds_of` as for
/// measure_merge_rate(). Collective over `world`.
[[nodiscard]] ReadRate measure_read_rate(
    Control& world, Device& device, const Watchdog& watchdog, int threads,
    const std::function<double(const std::function<void(int calls)>&)>& seconds_of);

}  // namespace annulus::launcher
