#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include <annulus/core/device.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/control.hpp>
#include <annulus/ring/local_operations.hpp>

namespace annulus::launcher {

/// Two partial results of a given size, float32, for timing how they are merged.
class MergedResults {
 public:
  MergedResults(std::int64_t bytes_each, Device& device, Watchdog watchdog);

  /// Merges one into the other, `calls` times, and waits for the end.
  void merge(int calls);
  /// Bytes of one merge as a reduction counts them: two results read, one written.
  [[nodiscard]] double bytes() const;

 private:
  struct State {
    Tensor output, lse;
  };
  [[nodiscard]] SoftmaxState state(std::size_t which) const;

  std::unique_ptr<Stream> stream_;
  std::unique_ptr<ring::LocalOperations> operations_;
  std::array<State, 2> states_;
};

/// Bytes per second of merging large results, which fit in no cache: what one of 64 MiB takes
/// longer than one of 1 MiB. `seconds_of(body)` times body(calls) and returns the seconds of a
/// call.
/// Collective over `world`.
template <class SecondsOf>
double measure_merge_rate(Control& world, Device& device, const Watchdog& watchdog,
                          const SecondsOf& seconds_of) {
  constexpr std::int64_t kSmall = 1 << 20;
  constexpr std::int64_t kLarge = 64 << 20;
  const auto timed = [&](std::int64_t bytes) {
    const auto results = collectively(
        world, [&] { return std::make_unique<MergedResults>(bytes, device, watchdog); });
    return std::pair(results->bytes(), seconds_of([&](int calls) { results->merge(calls); }));
  };
  const auto [small_bytes, small_seconds] = timed(kSmall);
  const auto [bytes, seconds] = timed(kLarge);
  return seconds > small_seconds ? (bytes - small_bytes) / (seconds - small_seconds)
                                 : bytes / seconds;
}

}  // namespace annulus::launcher
