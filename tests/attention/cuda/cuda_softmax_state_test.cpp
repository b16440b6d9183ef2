// The elementwise work on a GPU, against the same functions on the CPU.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include <annulus/attention/accuracy.hpp>
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

// With whole packs of sixteen bytes, with gaps between them, and with vectors that are not whole
// packs.
const StateShape kShapes[] = {{{2, 33, 4, 128}, 128}, {{1, 17, 3, 64}, 72}, {{2, 5, 3, 40}, 41},
                              {{1, 3, 2, 7}, 7},      {{1, 1, 1, 1}, 1},    {{1, 9, 2, 520}, 520}};

using CudaSoftmaxState = CudaTest;

// Parts of a whole as combine() takes them: some cover everything, some a corner of it.
std::vector<PartialState> parts_of(const std::vector<SoftmaxState>& states, const Extents& shape) {
  std::vector<PartialState> parts;
  for (std::size_t i = 0; i < states.size(); ++i) {
    const std::int64_t row = i % 2 == 0 ? 0 : shape[1] / 2;
    const std::int64_t head = i % 3 == 0 ? 0 : shape[2] / 2;
    parts.push_back(
        {{states[i].output.slice(1, row, shape[1] - row).slice(2, head, shape[2] - head),
          states[i].lse.slice(1, head, shape[2] - head).slice(2, row, shape[1] - row)},
         row,
         head});
  }
  return parts;
}

TEST_F(CudaSoftmaxState, CombinesAsOnTheCpu) {
  Random random(61);
  for (const auto& [shape, padded] : kShapes) {
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
      // Few of one dtype, few of two, and many take different ways.
      for (const std::size_t count :
           {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{7}}) {
        for (const bool mixed : {false, true}) {
          SCOPED_TRACE(to_string(shape) + " " + std::string(name_of(dtype)) + " parts " +
                       std::to_string(count) + (mixed ? " mixed" : ""));
          std::vector<HostState> hosts;
          std::vector<HostState> wide;
          for (std::size_t i = 0; i < count; ++i) {
            hosts.emplace_back(random, mixed && i % 2 == 1 ? DType::float32 : dtype, shape, padded);
            hosts.back().make_empty(0, static_cast<std::int64_t>(i) % shape[1], 0);
            hosts.back().make_empty(0, shape[1] - 1, shape[2] - 1);
            wide.push_back(widened(random, hosts.back(), shape));
          }
          std::vector<DeviceState> devices;
          devices.reserve(count);
          std::vector<SoftmaxState> there;
          std::vector<SoftmaxState> here;
          for (std::size_t i = 0; i < count; ++i) {
            devices.emplace_back(hosts[i], *device_);
            there.push_back(devices.back().state());
            here.push_back(wide[i].state());
          }
          for (const DType out : {dtype, DType::float32}) {
            const HostState result(random, out, shape, padded);
            const DeviceState target(result, *device_);
            cuda::combine(parts_of(there, shape), target.state(), *stream_);
            stream_->synchronize();
            target.download();
            const HostState expected(random, DType::float32, shape, shape[3]);
            combine(parts_of(here, shape), expected.state());
            const double rounding = out == DType::float32 ? 4e-6 : unit_roundoff(out) * 1.01;
            expect_near(widened(random, result, shape).state(), expected.state(), rounding);
          }
        }
      }
    }
  }
}

TEST_F(CudaSoftmaxState, CombinesInPlaceWithFloat64Lse) {
  Random random(62);
  const Extents shape{1, 9, 3, 64};
  const HostState first(random, DType::float32, shape, 64);
  const HostState second(random, DType::float32, shape, 64);
  const DeviceState on_device(first, *device_);
  const DeviceState other(second, *device_);
  const Tensor lse(DType::float64, first.lse.shape(), test_memory());
  for (std::int64_t i = 0; i < lse.view().elements(); ++i) {
    // A fraction that float32 cannot hold beside 8.
    lse.view().as<double>()[i] = 8 + 1e-9 * static_cast<double>(i);
  }
  const Mirror lse_there(lse, *device_);
  const SoftmaxState state{on_device.state().output, lse_there.view()};
  cuda::combine(std::vector<PartialState>{{state, 0, 0}}, state, *stream_);
  stream_->synchronize();
  Tensor before(DType::float64, lse.shape(), test_memory());
  copy(lse.view(), before.view());
  lse_there.download();
  EXPECT_EQ(std::memcmp(lse.view().data(), before.view().data(), lse.bytes()), 0);

  const HostState copy_of_first = widened(random, first, shape);
  const SoftmaxState host{copy_of_first.state().output, before.view()};
  cuda::combine(std::vector<PartialState>{{state, 0, 0}, {other.state(), 0, 0}}, state, *stream_);
  stream_->synchronize();
  on_device.download();
  lse_there.download();
  combine(std::vector<PartialState>{{host, 0, 0}, {second.state(), 0, 0}}, host);
  expect_near({first.state().output, lse.view()}, host, 4e-7);
}

// A state with a maximum, on both sides; LSEs lie above their maxima.
struct MaximumState {
  MaximumState(Random& random, const Extents& shape, DType lse_dtype, Device& device)
      : output(random_tensor(random, DType::float32, shape)),
        lse(lse_dtype, {shape[0], shape[2], shape[1]}, test_memory()),
        maximum(random_tensor(random, DType::float32, {shape[0], shape[2], shape[1]}, 4.0F)) {
    for (std::int64_t i = 0; i < lse.shape().product(); ++i) {
      const double above = static_cast<double>(draw(random, 0, 30)) / 8;
      if (draw(random, 0, 9) == 0) {
        maximum.view().as<float>()[i] = -std::numeric_limits<float>::infinity();
      }
      const double value = maximum.view().as<float>()[i] + above;
      if (lse_dtype == DType::float64) {
        lse.view().as<double>()[i] = value;
      } else {
        lse.view().as<float>()[i] = static_cast<float>(value);
      }
    }
    output_there.emplace(output, device);
    lse_there.emplace(lse, device);
    maximum_there.emplace(maximum, device);
  }
  MaximumState(const MaximumState&) = delete;
  MaximumState& operator=(const MaximumState&) = delete;
  [[nodiscard]] SoftmaxState here() const { return {output.view(), lse.view(), maximum.view()}; }
  [[nodiscard]] SoftmaxState there() const {
    return {output_there->view(), lse_there->view(), maximum_there->view()};
  }
  void download() const {
    output_there->download();
    lse_there->download();
    maximum_there->download();
  }
  Tensor output, lse, maximum;
  std::optional<Mirror> output_there, lse_there, maximum_there;
};

// Rows [row, …) and heads [head, …) of a state, as a part that begins there.
PartialState corner(const SoftmaxState& state, std::int64_t row, std::int64_t head) {
  const std::int64_t rows = state.output.size(1) - row;
  const std::int64_t heads = state.output.size(2) - head;
  const auto of_rows = [&](const TensorView& view) {
    return view.slice(1, head, heads).slice(2, row, rows);
  };
  return {{state.output.slice(1, row, rows).slice(2, head, heads), of_rows(state.lse),
           of_rows(state.maximum)},
          row,
          head};
}

void expect_same_state(const SoftmaxState& got, const SoftmaxState& want, double tolerance) {
  expect_near(got, want, tolerance);
  for (std::int64_t i = 0; i < want.maximum.elements(); ++i) {
    ASSERT_EQ(got.maximum.as<float>()[i], want.maximum.as<float>()[i]) << i;
  }
}

TEST_F(CudaSoftmaxState, CombinesMaximaAsOnTheCpuInBothForms) {
  Random random(69);
  for (const Extents& shape : {Extents{2, 33, 4, 64}, Extents{1, 5, 3, 7}, Extents{1, 1, 1, 1}}) {
    for (const DType lse : {DType::float32, DType::float64}) {
      for (const int count : {0, 1, 3, kMaximumParts}) {
        for (const SoftmaxForm form : {SoftmaxForm::normalised, SoftmaxForm::unnormalised}) {
          std::vector<std::unique_ptr<MaximumState>> states;
          std::vector<PartialState> here;
          std::vector<PartialState> there;
          for (int i = 0; i < count; ++i) {
            states.push_back(std::make_unique<MaximumState>(random, shape, lse, *device_));
            const std::int64_t row = i % 2 == 0 ? 0 : shape[1] / 2;
            const std::int64_t head = i % 3 == 0 ? 0 : shape[2] / 2;
            here.push_back(corner(states.back()->here(), row, head));
            there.push_back(corner(states.back()->there(), row, head));
          }
          const MaximumState expected(random, shape, lse, *device_);
          combine(here, expected.here(), form);
          const MaximumState result(random, shape, lse, *device_);
          cuda::combine(there, result.there(), *stream_, form);
          stream_->synchronize();
          result.download();
          SCOPED_TRACE(to_string(shape) + " parts " + std::to_string(count));
          expect_same_state(result.here(), expected.here(), 8e-6);
          if (count == 0) continue;
          // In place of a part that covers everything.
          combine(here, states[0]->here(), form);
          const MaximumState& first = *states[0];
          cuda::combine(there, first.there(), *stream_, form);
          stream_->synchronize();
          first.download();
          expect_same_state(first.here(), expected.here(), 8e-6);
        }
      }
    }
  }
}

TEST_F(CudaSoftmaxState, RoundsUnnormalisedOutputs) {
  Random random(70);
  const Extents shape{1, 9, 2, 24};
  const MaximumState first(random, shape, DType::float64, *device_);
  const MaximumState second(random, shape, DType::float64, *device_);
  const MaximumState expected(random, shape, DType::float64, *device_);
  combine(std::vector<PartialState>{{first.here()}, {second.here()}}, expected.here(),
          SoftmaxForm::unnormalised);
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    const HostState rounded(random, dtype, shape, shape[3]);
    const DeviceState target(rounded, *device_);
    const MaximumState rows(random, shape, DType::float32, *device_);
    cuda::combine(std::vector<PartialState>{{first.there()}, {second.there()}},
                  {target.state().output, rows.there().lse, rows.there().maximum}, *stream_,
                  SoftmaxForm::unnormalised);
    stream_->synchronize();
    target.download();
    rows.download();
    expect_near({widened(random, rounded, shape).state().output, rows.lse.view()}, expected.here(),
                unit_roundoff(dtype) * 1.01);
  }
}

TEST_F(CudaSoftmaxState, NansAndNothingAmongMaxima) {
  Random random(71);
  const Extents shape{1, 3, 1, 4};  // rows: NaN, only logits of −∞, nothing
  const MaximumState host(random, shape, DType::float32, *device_);
  const float nan = std::nanf("");
  const float nothing = -std::numeric_limits<float>::infinity();
  const std::array rows{std::array{nan, nan, nan}, std::array{nan, nothing, nothing},
                        std::array{0.0F, nothing, nothing}};
  for (std::size_t t = 0; t < rows.size(); ++t) {
    std::fill_n(host.output.view().as<float>() + 4 * t, 4, rows.at(t)[0]);
    host.lse.view().as<float>()[t] = rows.at(t)[1];
    host.maximum.view().as<float>()[t] = rows.at(t)[2];
  }
  const Mirror output(host.output, *device_);
  const Mirror lse(host.lse, *device_);
  const Mirror maximum(host.maximum, *device_);
  const MaximumState result(random, shape, DType::float32, *device_);
  cuda::combine(std::vector<PartialState>{{{output.view(), lse.view(), maximum.view()}}},
                result.there(), *stream_, SoftmaxForm::unnormalised);
  stream_->synchronize();
  result.download();
  const auto* outputs = result.output.view().as<float>();
  const auto* sums = result.lse.view().as<float>();
  const auto* maxima = result.maximum.view().as<float>();
  EXPECT_TRUE(std::isnan(outputs[0]) && std::isnan(sums[0]) && std::isnan(maxima[0]));
  EXPECT_TRUE(std::isnan(outputs[4]));
  EXPECT_EQ(outputs[8], 0);
  for (const int t : {1, 2}) {
    EXPECT_EQ(sums[t], 0);
    EXPECT_EQ(maxima[t], nothing);
  }
}

TEST_F(CudaSoftmaxState, PartsOfNoWeightYieldToOthersButNotToNothing) {
  Random random(68);
  // By the three kernels: few parts of a half type, few, and many.
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    for (const std::size_t empties : {std::size_t{0}, std::size_t{1}, std::size_t{6}}) {
      for (const bool weight : {false, true}) {
        const Extents shape{1, 3, 2, 16};
        std::vector<HostState> hosts;
        for (std::size_t i = 0; i < empties + 1; ++i) {
          hosts.emplace_back(random, dtype, shape, 16);
          const float value = i == 0 ? std::nanf("") : 0.0F;
          for (std::int64_t t = 0; t < 3; ++t) {
            for (std::int64_t n = 0; n < 2; ++n) {
              hosts.back().state().set_lse_at(0, n, t, -std::numeric_limits<double>::infinity());
              for (std::int64_t d = 0; d < 16; ++d) {
                from_float32(&value, dtype, hosts.back().state().output.address({0, t, n, d}), 1);
              }
            }
          }
        }
        if (weight) hosts.emplace_back(random, dtype, shape, 16);
        std::vector<DeviceState> devices;
        devices.reserve(hosts.size());
        std::vector<PartialState> parts;
        for (const HostState& host : hosts) {
          devices.emplace_back(host, *device_);
          parts.push_back({devices.back().state(), 0, 0});
        }
        const HostState result(random, dtype, shape, 16);
        const DeviceState target(result, *device_);
        cuda::combine(parts, target.state(), *stream_);
        stream_->synchronize();
        target.download();
        const HostState got = widened(random, result, shape);
        for (std::int64_t t = 0; t < 3; ++t) {
          for (std::int64_t n = 0; n < 2; ++n) {
            const float value = got.state().output.at<float>({0, t, n, 5});
            EXPECT_EQ(std::isnan(value), !weight);
            EXPECT_EQ(std::isinf(result.state().lse_at(0, n, t)), !weight);
          }
        }
      }
    }
  }
}

TEST_F(CudaSoftmaxState, NotANumberShows) {
  Random random(67);
  const Extents shape{1, 1, 1, 16};
  const HostState good(random, DType::bfloat16, shape, 16);
  const HostState bad(random, DType::bfloat16, shape, 16);
  bad.state().set_lse_at(0, 0, 0, std::nan(""));
  const DeviceState first(good, *device_);
  const DeviceState second(bad, *device_);
  const HostState result(random, DType::bfloat16, shape, 16);
  const DeviceState target(result, *device_);
  cuda::combine(std::vector<PartialState>{{first.state(), 0, 0}, {second.state(), 0, 0}},
                target.state(), *stream_);
  stream_->synchronize();
  target.download();
  EXPECT_TRUE(std::isnan(result.state().lse_at(0, 0, 0)));
  EXPECT_TRUE(std::isnan(*widened(random, result, shape).output.view().as<float>()));
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

TEST_F(CudaSoftmaxState, ResetsRowsBeyondLengths) {
  Random random(68);
  const Extents shape{4, 5, 3, 40};
  const std::vector<std::int32_t> kept{5, 0, 1, 4};
  const Tensor lengths(DType::int32, {4}, test_memory());
  std::copy(kept.begin(), kept.end(), lengths.view().as<std::int32_t>());
  const Mirror lengths_there(lengths, *device_);
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    const HostState host(random, dtype, shape, 41);
    const HostState expected = widened(random, host, shape);
    for (std::int64_t b = 0; b < shape[0]; ++b) {
      const std::int64_t first = kept[static_cast<std::size_t>(b)];
      const SoftmaxState whole = expected.state();
      combine({}, {whole.output.slice(0, b, 1).slice(1, first, shape[1] - first),
                   whole.lse.slice(0, b, 1).slice(2, first, shape[1] - first)});
    }
    const DeviceState state(host, *device_);
    cuda::reset_beyond(lengths_there.view(), state.state(), *stream_);
    stream_->synchronize();
    state.download();
    expect_near(widened(random, host, shape).state(), expected.state(), 0);
  }
}

TEST_F(CudaSoftmaxState, RefusesWhatDoesNotFit) {
  Random random(66);
  const HostState host(random, DType::bfloat16, {1, 2, 3, 8}, 8);
  const HostState wide(random, DType::float32, {1, 2, 3, 8}, 8);
  const DeviceState narrow(host, *device_);
  const DeviceState state(wide, *device_);
  const HostState half(random, DType::float16, {1, 2, 3, 8}, 8);
  const DeviceState other(half, *device_);
  const std::vector<PartialState> two{{narrow.state(), 0, 0}, {other.state(), 0, 0}};
  EXPECT_THROW(cuda::combine(two, state.state(), *stream_), InternalError);
  EXPECT_THROW(
      cuda::combine(std::vector<PartialState>{{narrow.state(), 1, 0}}, state.state(), *stream_),
      InternalError);
  EXPECT_THROW(
      cuda::combine(std::vector<PartialState>(kMaximumParts + 1, PartialState{state.state(), 0, 0}),
                    state.state(), *stream_),
      InternalError);
  // Maxima that are missing or do not fit, and rounded parts beside them.
  const MaximumState good(random, {1, 2, 3, 8}, DType::float32, *device_);
  const auto combine_one = [&](const SoftmaxState& part, const SoftmaxState& into) {
    cuda::combine(std::vector<PartialState>{{part}}, into, *stream_, SoftmaxForm::unnormalised);
  };
  EXPECT_NO_THROW(combine_one(good.there(), good.there()));
  EXPECT_THROW(combine_one(good.there(), state.state()), InternalError);
  EXPECT_THROW(combine_one(state.state(), good.there()), InternalError);
  SoftmaxState short_one = good.there();
  short_one.maximum = short_one.maximum.slice(2, 0, 1);
  EXPECT_THROW(combine_one(good.there(), short_one), InternalError);
  SoftmaxState rounded = narrow.state();
  rounded.maximum = good.there().maximum;
  EXPECT_THROW(combine_one(rounded, good.there()), InternalError);
}

}  // namespace
}  // namespace annulus::test
