#include "launcher/bench/calibration/memory_rates.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/ring/local_operations.hpp>

#include "launcher/bench/repeated_call.hpp"
#include "launcher/bench/zero_tensor.hpp"

namespace annulus::launcher {
namespace {

constexpr std::int64_t kDim = 128;

/// Work that moves bytes through memory.
struct MemoryTime {
  double bytes = 0;
  double seconds = 0;
};

/// Bytes per second, from the difference of two times, so that calls do not count; from the larger
/// work alone if it does not take longer.
double memory_rate(const MemoryTime& small, const MemoryTime& large) {
  return large.seconds > small.seconds
             ? (large.bytes - small.bytes) / (large.seconds - small.seconds)
             : large.bytes / large.seconds;
}

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
  static constexpr std::int64_t kHeads = 32;
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

// One query row, the last one, against many keys and values.
class LongCache {
 public:
  LongCache(std::int64_t keys, Device& device, Watchdog watchdog, int threads)
      : stream_(device.make_stream("reading", std::move(watchdog), nullptr)),
        reading_(device, *stream_, [this, threads](int /*i*/) {
          kernel_->forward(block_, result_, {*stream_, nullptr, threads});
        }) {
    problem_.shape = {1, 1, keys, kHeads, kHeads, kDim, kDim};
    problem_.dtype = device.place().is_host() ? DType::float32 : DType::bfloat16;
    const Selection selection = registry_.select("auto", problem_, device.place());
    const Implementation* chosen = selection.candidates.front();
    for (const Implementation* candidate : selection.candidates) {
      if (candidate->few_rows(problem_).most == 0) continue;
      chosen = candidate;
      break;
    }
    name_ = chosen->names().front();
    const auto zeros = [&](DType dtype, const Extents& shape) {
      return zero_tensor(dtype, shape, device, *stream_);
    };
    query_ = zeros(problem_.dtype, {1, 1, kHeads, kDim});
    key_ = zeros(problem_.dtype, {1, keys, kHeads, kDim});
    value_ = zeros(problem_.dtype, {1, keys, kHeads, kDim});
    output_ =
        zeros(chosen->declares().results == ResultForm::rounded ? problem_.dtype
                                                                : partial_dtype(problem_.dtype),
              {1, 1, kHeads, kDim});
    lse_ = zeros(DType::float32, {1, kHeads, 1});
    block_ = {query_.view(),
              key_.view(),
              value_.view(),
              PositionRanges::all(1),
              PositionRanges::all(keys),
              0,
              0,
              /*unmasked=*/true,
              {},
              {}};
    result_ = {output_.view(), lse_.view()};
    kernel_ = chosen->make_kernel(problem_, device);
    obstacle_ = chosen->takes(problem_, geometry_of(block_)).reason();
    if (!obstacle_.empty()) return;
    try {
      kernel_->prepare(block_, result_);
    } catch (const UnsupportedError& refusal) {
      obstacle_ = refusal.what();
    }
  }

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& obstacle() const { return obstacle_; }
  [[nodiscard]] double bytes() const { return static_cast<double>(key_.bytes() + value_.bytes()); }
  void read(int calls) { reading_.run(calls); }

 private:
  static constexpr std::int64_t kHeads = 8;

  Registry registry_ = Registry::standard();
  AttentionProblem problem_;
  std::unique_ptr<Stream> stream_;
  Tensor query_, key_, value_, output_, lse_;
  AttentionBlock block_;
  SoftmaxState result_;
  std::string name_, obstacle_;
  std::unique_ptr<Kernel> kernel_;
  RepeatedCall reading_;
};

}  // namespace

double measure_merge_rate(Control& world, Device& device, const Watchdog& watchdog,
                          const SecondsOfCall& seconds_of) {
  const auto timed = [&](std::int64_t bytes) {
    const auto results = collectively(
        world, [&] { return std::make_unique<MergedResults>(bytes, device, watchdog); });
    return MemoryTime{results->bytes(), seconds_of([&](int calls) { results->merge(calls); })};
  };
  const std::int64_t large = device.place().is_host() ? 64 << 20 : 256 << 20;
  const MemoryTime small = timed(large / 8);
  return memory_rate(small, timed(large));
}

ReadRate measure_read_rate(Control& world, Device& device, const Watchdog& watchdog, int threads,
                           const SecondsOfCall& seconds_of) {
  ReadRate found;
  const auto timed = [&](std::int64_t keys) {
    const auto cache = collectively(
        world, [&] { return std::make_unique<LongCache>(keys, device, watchdog, threads); });
    found.text = world.first_text(cache->obstacle(), "what kernels refuse");
    if (!found.text.empty()) return MemoryTime{};
    found.text = cache->name();
    return MemoryTime{cache->bytes(), seconds_of([&](int calls) { cache->read(calls); })};
  };
  const std::int64_t keys = device.place().is_host() ? 16 << 10 : 128 << 10;
  const MemoryTime small = timed(keys / 4);
  if (small.seconds == 0) return found;
  const MemoryTime large = timed(keys);
  if (large.seconds > 0) found.bytes_per_second = memory_rate(small, large);
  return found;
}

}  // namespace annulus::launcher
