#include "launcher/bench/calibration/merge_rate.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/ring/local_operations.hpp>

#include "launcher/bench/calibration/memory_rate.hpp"
#include "launcher/bench/repeated_call.hpp"
#include "launcher/bench/zero_tensor.hpp"

namespace annulus::launcher {
namespace {

constexpr std::int64_t kHeads = 32;
constexpr std::int64_t kDim = 128;
constexpr std::int64_t kBytesOnHost = 64 << 20;
constexpr std::int64_t kBytesOnGpu = 256 << 20;
constexpr std::int64_t kSmaller = 8;

// Two partial results, float32, and memory for a third.
class MergedResults {
 public:
  MergedResults(std::int64_t bytes_each, Device& device, Watchdog watchdog)
      : stream_(device.make_stream("merge", std::move(watchdog), nullptr)),
        operations_(ring::make_local_operations(device.place())),
        merging_(device, *stream_, [this](int /*i*/) {
          const std::vector<PartialState> parts{{state(0), 0, 0}, {state(1), 0, 0}};
          operations_->combine(parts, state(2), SoftmaxForm::normalised, *stream_);
        }) {
    const std::int64_t rows =
        bytes_each / (kHeads * kDim * static_cast<std::int64_t>(size_of(DType::float32)));
    for (State& one : states_) {
      one = {zero_tensor(DType::float32, {1, rows, kHeads, kDim}, device, *stream_),
             zero_tensor(DType::float32, {1, kHeads, rows}, device, *stream_)};
    }
  }

  void merge(int calls) { merging_.run(calls); }
  [[nodiscard]] double bytes() const {
    return static_cast<double>(states_.size() * states_[0].output.bytes());
  }

 private:
  struct State {
    Tensor output, lse;
  };
  [[nodiscard]] SoftmaxState state(std::size_t which) const {
    return {states_.at(which).output.view(), states_.at(which).lse.view()};
  }

  std::unique_ptr<Stream> stream_;
  std::unique_ptr<ring::LocalOperations> operations_;
  std::array<State, 3> states_;
  RepeatedCall merging_;
};

}  // namespace

double measure_merge_rate(
    Control& world, Device& device, const Watchdog& watchdog,
    const std::function<double(const std::function<void(int calls)>&)>& seconds_of) {
  const auto timed = [&](std::int64_t bytes) {
    const auto results = collectively(
        world, [&] { return std::make_unique<MergedResults>(bytes, device, watchdog); });
    return MemoryTime{results->bytes(), seconds_of([&](int calls) { results->merge(calls); })};
  };
  const std::int64_t large = device.place().is_host() ? kBytesOnHost : kBytesOnGpu;
  const MemoryTime small = timed(large / kSmaller);
  return memory_rate(small, timed(large));
}

}  // namespace annulus::launcher
