// The elementwise work on a GPU, against the same functions on the CPU.
#include <annulus/attention/softmax_state_cuda.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/cuda_run.hpp"

namespace annulus::test {
namespace {

// Host tensors with holes: dimension 3 is cut out of `padded` elements.
struct HostState {
  HostState(Random& random, DType dtype, const Extents& shape, std::int64_t padded)
      : output(random_tensor(random, dtype, {shape[0], shape[1], shape[2], padded})),
        lse(random_tensor(random, DType::float32, {shape[0], shape[2], shape[1]}, 4.0F)),
        dim(shape[3]) {}
  [[nodiscard]] SoftmaxState state() const { return {output.view().slice(3, 0, dim), lse.view()}; }
  void make_empty(std::int64_t b, std::int64_t t, std::int64_t n) const {
    state().set_lse_at(b, n, t, -std::numeric_limits<double>::infinity());
  }
  Tensor output;
  Tensor lse;
  std::int64_t dim;
};

class DeviceState {
 public:
  DeviceState(const HostState& host, Device& device)
      : output_(host.output, device), lse_(host.lse, device), host_(host) {}
  [[nodiscard]] SoftmaxState state() const {
    return {output_.at(host_.state().output), lse_.at(host_.state().lse)};
  }
  void download() const {
    output_.download();
    lse_.download();
  }

 private:
  Mirror output_;
  Mirror lse_;
  const HostState& host_;
};

HostState widened(Random& random, const HostState& narrow, const Extents& shape) {
  HostState wide(random, DType::float32, shape, shape[3]);
  const ConstTensorView from = narrow.state().output;
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t t = 0; t < shape[1]; ++t) {
      for (std::int64_t n = 0; n < shape[2]; ++n) {
        to_float32(from.address({b, t, n, 0}), from.dtype(),
                   static_cast<float*>(wide.output.view().address({b, t, n, 0})), shape[3]);
      }
    }
  }
  copy(narrow.lse.view(), wide.lse.view());
  return wide;
}

void expect_near(const SoftmaxState& got, const SoftmaxState& want, double tolerance) {
  const Extents& shape = want.output.shape();
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t t = 0; t < shape[1]; ++t) {
      for (std::int64_t n = 0; n < shape[2]; ++n) {
        const double lse = want.lse_at(b, n, t);
        if (std::isinf(lse)) {
          EXPECT_EQ(got.lse_at(b, n, t), lse);
        } else {
          EXPECT_NEAR(got.lse_at(b, n, t), lse, tolerance * (1 + std::abs(lse)));
        }
        for (std::int64_t d = 0; d < shape[3]; ++d) {
          const float value = want.output.at<float>({b, t, n, d});
          ASSERT_NEAR(got.output.at<float>({b, t, n, d}), value, tolerance * (1 + std::abs(value)));
        }
      }
    }
  }
}

struct StateShape {
  Extents shape;
  std::int64_t padded;  // of the last dimension in memory
};

// With whole packs of sixteen bytes, with gaps between them, and with vectors that are no packs.
const StateShape kShapes[] = {{{2, 33, 4, 128}, 128}, {{1, 17, 3, 64}, 72}, {{2, 5, 3, 40}, 41},
                              {{1, 3, 2, 7}, 7},      {{1, 1, 1, 1}, 1},    {{1, 9, 2, 520}, 520}};

using CudaSoftmaxState = CudaTest;

TEST_F(CudaSoftmaxState, MergesAsOnTheCpu) {
  Random random(61);
  for (const auto& [shape, padded] : kShapes) {
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
      SCOPED_TRACE(to_string(shape) + " " + std::string(name_of(dtype)));
      const HostState state(random, DType::float32, shape, padded);
      const HostState partial(random, dtype, shape, padded);
      state.make_empty(0, 0, 0);
      partial.make_empty(0, shape[1] - 1, shape[2] - 1);
      const HostState expected = widened(random, state, shape);
      const HostState wide_partial = widened(random, partial, shape);
      const DeviceState on_device(state, *device_);
      const DeviceState partial_on_device(partial, *device_);
      cuda::merge(on_device.state(), partial_on_device.state(), *stream_);
      stream_->synchronize();
      on_device.download();
      merge(expected.state(), wide_partial.state());
      expect_near(state.state(), expected.state(), 4e-6);
    }
  }
}

TEST_F(CudaSoftmaxState, EmptyElementsChangeNoBit) {
  Random random(62);
  const Extents shape{1, 8, 2, 16};
  const HostState original(random, DType::float32, shape, 16);
  const HostState empty(random, DType::float32, shape, 16);
  const DeviceState state(original, *device_);
  const DeviceState nothing(empty, *device_);
  const HostState before = widened(random, original, shape);
  cuda::reset(nothing.state(), *stream_);
  cuda::merge(state.state(), nothing.state(), *stream_);  // state · empty
  cuda::merge(nothing.state(), state.state(), *stream_);  // empty · state
  stream_->synchronize();
  state.download();
  nothing.download();
  for (const HostState* after : {&original, &empty}) {
    EXPECT_EQ(std::memcmp(after->output.view().data(), before.output.view().data(),
                          before.output.bytes()),
              0);
    EXPECT_EQ(std::memcmp(after->lse.view().data(), before.lse.view().data(), before.lse.bytes()),
              0);
  }
}

TEST_F(CudaSoftmaxState, ResetsEveryDtype) {
  Random random(63);
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    const Extents shape{2, 5, 3, 40};
    const HostState host(random, dtype, shape, 41);
    const DeviceState state(host, *device_);
    cuda::reset(state.state(), *stream_);
    stream_->synchronize();
    state.download();
    const HostState wide = widened(random, host, shape);
    for (std::int64_t i = 0; i < shape.product(); ++i) {
      EXPECT_EQ(wide.output.view().as<float>()[i], 0.0F);
    }
    for (std::int64_t i = 0; i < wide.lse.view().elements(); ++i) {
      EXPECT_EQ(wide.lse.view().as<float>()[i], -std::numeric_limits<float>::infinity());
    }
  }
}

TEST_F(CudaSoftmaxState, RoundsAndWidensEveryBitAsOnTheCpu) {
  Random random(64);
  for (const auto& [shape, padded] : kShapes) {
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
      SCOPED_TRACE(to_string(shape) + " " + std::string(name_of(dtype)));
      const HostState host(random, DType::float32, shape, padded);
      const DeviceState state(host, *device_);
      const HostState rounded(random, dtype, shape, padded);
      const DeviceState target(rounded, *device_);
      cuda::round_output(state.state(), target.state().output, *stream_);
      const HostState back(random, DType::float32, shape, shape[3]);
      const DeviceState wide(back, *device_);
      cuda::widen(target.state(), wide.state(), *stream_);
      stream_->synchronize();
      wide.download();
      target.download();
      const Tensor expected(dtype, shape, test_memory());
      round_output(host.state(), expected.view());
      std::vector<float> values(static_cast<std::size_t>(shape.product()));
      to_float32(expected.view().data(), dtype, values.data(), shape.product());
      EXPECT_EQ(std::memcmp(back.output.view().data(), values.data(), back.output.bytes()), 0);
      EXPECT_EQ(std::memcmp(back.lse.view().data(), rounded.lse.view().data(), back.lse.bytes()),
                0);
    }
  }
}

TEST_F(CudaSoftmaxState, CopiesWhateverTheStrides) {
  Random random(65);
  for (const DType dtype : {DType::float32, DType::float16}) {
    const Tensor source = random_tensor(random, dtype, {3, 5, 7, 16});
    const Mirror from(source, *device_);
    for (const auto& view :
         {source.view(), source.view().permute({0, 2, 1, 3}), source.view().slice(3, 0, 8),
          source.view().slice(3, 3, 5), source.view().permute({3, 1, 2, 0})}) {
      const Tensor target(dtype, view.shape(), test_memory());
      std::memset(target.view().data(), 0, target.bytes());
      const Mirror to(target, *device_);
      cuda::copy(from.at(view), to.view(), *stream_);
      stream_->synchronize();
      to.download();
      const Tensor expected(dtype, view.shape(), test_memory());
      copy(view, expected.view());
      EXPECT_EQ(std::memcmp(target.view().data(), expected.view().data(), target.bytes()), 0)
          << to_string(view.shape()) << " strides " << to_string(view.strides());
    }
  }
}

TEST_F(CudaSoftmaxState, RefusesWhatDoesNotFit) {
  Random random(66);
  const HostState host(random, DType::bfloat16, {1, 2, 3, 8}, 8);
  const HostState wide(random, DType::float32, {1, 2, 3, 8}, 8);
  const DeviceState narrow(host, *device_);
  const DeviceState state(wide, *device_);
  EXPECT_THROW(cuda::merge(narrow.state(), state.state(), *stream_), InternalError);
  EXPECT_THROW(cuda::widen(state.state(), narrow.state(), *stream_), InternalError);
  EXPECT_THROW(cuda::copy(narrow.state().output, state.state().output, *stream_), InternalError);
}

}  // namespace
}  // namespace annulus::test
