#include "launcher/bench/calibration/read_rate.hpp"

#include <cstdint>
#include <memory>
#include <utility>

#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>

#include "launcher/bench/agreed.hpp"
#include "launcher/bench/calibration/memory_rate.hpp"
#include "launcher/bench/repeated_call.hpp"
#include "launcher/bench/zero_tensor.hpp"

namespace annulus::launcher {
namespace {

constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kDim = 128;
constexpr std::int64_t kKeysOnHost = 16 << 10;  // 128 MiB
constexpr std::int64_t kKeysOnGpu = 128 << 10;  // 512 MiB
constexpr std::int64_t kSmaller = 4;

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

ReadRate measure_read_rate(
    Control& world, Device& device, const Watchdog& watchdog, int threads,
    const std::function<double(const std::function<void(int calls)>&)>& seconds_of) {
  ReadRate found;
  const auto timed = [&](std::int64_t keys) {
    const auto cache = collectively(
        world, [&] { return std::make_unique<LongCache>(keys, device, watchdog, threads); });
    found.text = agreed(cache->obstacle(), world);
    if (!found.text.empty()) return MemoryTime{};
    found.text = cache->name();
    return MemoryTime{cache->bytes(), seconds_of([&](int calls) { cache->read(calls); })};
  };
  const std::int64_t keys = device.place().is_host() ? kKeysOnHost : kKeysOnGpu;
  const MemoryTime small = timed(keys / kSmaller);
  if (small.seconds == 0) return found;
  const MemoryTime large = timed(keys);
  if (large.seconds > 0) found.bytes_per_second = memory_rate(small, large);
  return found;
}

}  // namespace annulus::launcher
