#pragma once

#include <functional>

#include <annulus/core/device.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/control.hpp>

namespace annulus::launcher {

/// Bytes per second of merging two large results into a third, as a reduction counts them: two
/// read, one written. Each has 256 MiB on a GPU, which caches some 50 MB, and 64 MiB on a CPU,
/// where a larger cache would make it too fast. The time of an eighth of that is subtracted.
/// `seconds_of(body)` times body(calls) and returns the seconds of a call. Collective over `world`.
[[nodiscard]] double measure_merge_rate(
    Control& world, Device& device, const Watchdog& watchdog,
    const std::function<double(const std::function<void(int calls)>&)>& seconds_of);

}  // namespace annulus::launcher
