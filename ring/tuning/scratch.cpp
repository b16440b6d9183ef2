#include "tuning/scratch.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <annulus/core/convert.hpp>

namespace annulus::ring {
namespace {

// The number of random numbers, repeated until a tensor is full.
constexpr std::int64_t kPattern = std::int64_t{1} << 20;

// Uniform in [−1, 1), by a linear congruential generator.
std::vector<float> random_numbers(std::int64_t count) {
  std::vector<float> numbers(static_cast<std::size_t>(count));
  std::uint64_t state = 1;
  for (float& number : numbers) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    number = static_cast<float>(state >> 40U) * 0x1p-23F - 1;
  }
  return numbers;
}

void store(const std::vector<float>& numbers, DType dtype, void* into) {
  if (dtype == DType::float64) {
    std::copy(numbers.begin(), numbers.end(), static_cast<double*>(into));
  } else {
    from_float32(numbers.data(), dtype, into, static_cast<std::int64_t>(numbers.size()));
  }
}

/// Fills tensors of the device with a pattern from the host.
class Filler {
 public:
  Filler(Device& device, const Watchdog& watchdog)
      : device_(device), stream_(device.make_stream("scratch", watchdog, nullptr)) {}

  void repeat(const Tensor& pattern, const TensorView& into) {
    const std::int64_t count = into.shape().product();
    const auto width = size_of(into.dtype());
    for (std::int64_t begin = 0; begin < count; begin += pattern.shape()[0]) {
      const std::int64_t part = std::min(pattern.shape()[0], count - begin);
      auto* const to =
          static_cast<std::byte*>(into.data()) + static_cast<std::size_t>(begin) * width;
      device_.copy(ConstTensorView(pattern.view().data(), into.dtype(), {part}, Place::host()),
                   TensorView(to, into.dtype(), {part}, into.place()), *stream_);
    }
    stream_->synchronize();  // before the pattern is freed
  }

 private:
  Device& device_;
  std::unique_ptr<Stream> stream_;
};

}  // namespace

ScratchTensors::ScratchTensors(const AttentionProblem& problem, const ShardedOperands& operands,
                               int rank, Device& device, const Watchdog& watchdog) {
  const auto current = device.make_current();
  MemoryPool& memory = device.memory();
  const auto make = [&](DType dtype, const NamedSharding& sharding) {
    return Tensor(dtype, sharding.local_shape(rank), memory);
  };
  query_ = make(problem.dtype, operands.query);
  key_ = make(problem.dtype, operands.key);
  value_ = make(problem.dtype, operands.value);
  output_ = make(problem.dtype, operands.output);
  tensors_ = {query_.view(), key_.view(), value_.view(), output_.view(), {}};
  if (problem.normalize_output) {
    lse_ = make(DType::float32, operands.lse);
    tensors_.lse = lse_.view();
  } else {
    maximum_ = make(DType::float32, operands.lse);
    sum_ = make(DType::float32, operands.lse);
    tensors_.maximum = maximum_.view();
    tensors_.sum = sum_.view();
  }
  Filler filler(device, watchdog);
  {
    const Tensor pattern(problem.dtype, {kPattern}, device.staging());
    store(random_numbers(kPattern), problem.dtype, pattern.view().data());
    for (const Tensor* tensor : {&query_, &key_, &value_}) filler.repeat(pattern, tensor->view());
  }
  const auto fill = [&](Tensor& tensor, DType dtype, const NamedSharding& sharding, int byte) {
    tensor = make(dtype, sharding);
    const Tensor pattern(dtype, {kPattern}, device.staging());
    std::memset(pattern.view().data(), byte, pattern.bytes());
    filler.repeat(pattern, tensor.view());
    return tensor.view();
  };
  if (operands.bias) tensors_.bias = fill(bias_, DType::float32, *operands.bias, 0);
  if (operands.dense_mask) tensors_.mask = fill(mask_, DType::boolean, *operands.dense_mask, 1);
}

}  // namespace annulus::ring
