#include "launcher/bench/merge_rate.hpp"

#include <cstddef>
#include <utility>
#include <vector>

#include <annulus/attention/softmax_state.hpp>

namespace annulus::launcher {
namespace {

constexpr std::int64_t kHeads = 32;
constexpr std::int64_t kDim = 128;

Tensor zeros(const Extents& shape, Device& device, Stream& stream) {
  Tensor host(DType::float32, shape, device.staging());
  host.fill_zero();
  Tensor tensor(DType::float32, shape, device.memory());
  device.copy(host.view(), tensor.view(), stream);
  stream.synchronize();
  return tensor;
}

}  // namespace

MergedResults::MergedResults(std::int64_t bytes_each, Device& device, Watchdog watchdog)
    : stream_(device.make_stream("merge", std::move(watchdog), nullptr)),
      operations_(ring::make_local_operations(device.place())) {
  const std::int64_t rows =
      bytes_each / (kHeads * kDim * static_cast<std::int64_t>(size_of(DType::float32)));
  for (State& state : states_) {
    state = {zeros({1, rows, kHeads, kDim}, device, *stream_),
             zeros({1, kHeads, rows}, device, *stream_)};
  }
}

void MergedResults::merge(int calls) {
  const std::vector<PartialState> parts{{state(0), 0, 0}, {state(1), 0, 0}};
  for (int i = 0; i < calls; ++i) {
    operations_->combine(parts, state(0), SoftmaxForm::normalised, *stream_);
  }
  stream_->synchronize();
}

double MergedResults::bytes() const {
  return 3.0 * static_cast<double>(states_[0].output.bytes());
}

SoftmaxState MergedResults::state(std::size_t which) const {
  const State& chosen = states_.at(which);
  return {chosen.output.view(), chosen.lse.view()};
}

}  // namespace annulus::launcher
