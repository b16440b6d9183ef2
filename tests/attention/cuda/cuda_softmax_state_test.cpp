// combine() and reset() on a GPU, against the same functions on the CPU.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include <annulus/attention/accuracy.hpp>
#include <annulus/attention/softmax_state_cuda.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/device_run.hpp"
#include "tests/support/cuda_test.hpp"

namespace annulus::test {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// A random state in host memory. Dimension 3 of the output is cut out of `padded` elements.
struct HostState {
  HostState(Random& random, DType dtype, const Extents& shape, std::int64_t padded = 0)
      : output(random_tensor(random, dtype,
                             {shape[0], shape[1], shape[2], std::max(padded, shape[3])})),
        lse(random_tensor(random, DType::float32, {shape[0], shape[2], shape[1]}, 4.0F)),
        dim(shape[3]) {}
  [[nodiscard]] SoftmaxState state() const {
    return {output.view().slice(3, 0, dim), lse.view(), maximum.view()};
  }
  Tensor output, lse;
  Tensor maximum = {};
  std::int64_t dim;
};

template <class Body>
void for_each_row(const SoftmaxState& state, const Body& body) {
  for_each_of<3>({state.output.size(0), state.output.size(1), state.output.size(2)}, body);
}

// With a maximum of each row, below the LSE; rows may have none.
HostState with_maximum(Random& random, const Extents& shape, DType lse_dtype) {
  HostState host(random, DType::float32, shape);
  host.maximum = random_tensor(random, DType::float32, host.lse.shape(), 4.0F);
  host.lse = Tensor(lse_dtype, host.lse.shape(), test_memory());
  const SoftmaxState state = host.state();
  for_each_row(state, [&](std::int64_t b, std::int64_t t, std::int64_t n) {
    float& maximum = state.maximum.at<float>({b, n, t});
    if (draw(random, 0, 9) == 0) maximum = kNothing;
    state.set_lse_at(b, n, t, maximum + static_cast<double>(draw(random, 0, 30)) / 8);
  });
  return host;
}

// The state in float32, without gaps.
HostState widened(const HostState& narrow) {
  Random random(0);
  const SoftmaxState from = narrow.state();
  HostState wide(random, DType::float32, from.output.shape());
  for_each_row(from, [&](std::int64_t b, std::int64_t t, std::int64_t n) {
    to_float32(from.output.address({b, t, n}), from.output.dtype(),
               static_cast<float*>(wide.output.view().address({b, t, n})), narrow.dim);
  });
  wide.lse = Tensor(narrow.lse.dtype(), narrow.lse.shape(), test_memory());
  copy(narrow.lse.view(), wide.lse.view());
  if (from.wants_maximum()) {
    wide.maximum = Tensor(DType::float32, narrow.maximum.shape(), test_memory());
    copy(narrow.maximum.view(), wide.maximum.view());
  }
  return wide;
}

void expect_near(const HostState& found, const HostState& expected, double tolerance) {
  const HostState wide = widened(found);
  const SoftmaxState got = wide.state();
  const SoftmaxState want = expected.state();
  for_each_row(want, [&](std::int64_t b, std::int64_t t, std::int64_t n) {
    const double lse = want.lse_at(b, n, t);
    if (std::isinf(lse)) {
      EXPECT_EQ(got.lse_at(b, n, t), lse);
    } else {
      EXPECT_NEAR(got.lse_at(b, n, t), lse, tolerance * (1 + std::abs(lse)));
    }
    if (want.wants_maximum()) {
      EXPECT_EQ(got.maximum.at<float>({b, n, t}), want.maximum.at<float>({b, n, t}));
    }
    for (std::int64_t d = 0; d < expected.dim; ++d) {
      const float value = want.output.at<float>({b, t, n, d});
      EXPECT_NEAR(got.output.at<float>({b, t, n, d}), value, tolerance * (1 + std::abs(value)));
    }
  });
}

// The i-th part of a whole: some cover everything, some a corner of it.
PartialState corner(const SoftmaxState& state, std::size_t i) {
  const std::int64_t row = i % 2 == 0 ? 0 : state.output.size(1) / 2;
  const std::int64_t head = i % 3 == 0 ? 0 : state.output.size(2) / 2;
  const std::int64_t rows = state.output.size(1) - row;
  const std::int64_t heads = state.output.size(2) - head;
  const auto of_rows = [&](const TensorView& view) {
    return view.rank() == 0 ? view : view.slice(1, head, heads).slice(2, row, rows);
  };
  return {{state.output.slice(1, row, rows).slice(2, head, heads), of_rows(state.lse),
           of_rows(state.maximum)},
          row,
          head};
}

class CudaSoftmaxState : public CudaTest {
 protected:
  using Body = std::function<void(Mirrors&, const SoftmaxState&)>;

  // Changes a state of host memory by what `body` does to its copy on the device.
  void change(const HostState& host, const Body& body) {
    Mirrors mirrors(*device_, *stream_);
    const SoftmaxState state = host.state();
    body(mirrors,
         {mirrors.result(state.output), mirrors.result(state.lse), mirrors.result(state.maximum)});
    mirrors.download();
  }
  // Parts in host memory. Parts that share the result's memory share it on the device, too.
  void combine_there(std::vector<PartialState> parts, const HostState& host,
                     SoftmaxForm form = SoftmaxForm::normalised) {
    change(host, [&](Mirrors& mirrors, const SoftmaxState& there) {
      for (PartialState& part : parts) {
        if (part.state.output.data() == host.output.view().data()) {
          part.state = there;
          continue;
        }
        for (TensorView* view : {&part.state.output, &part.state.lse, &part.state.maximum}) {
          if (view->rank() > 0) *view = mirrors.upload(*view);
        }
      }
      cuda::combine(parts, there, *stream_, form);
    });
  }
};

TEST_F(CudaSoftmaxState, CombinesAsOnTheCpu) {
  // With whole packs of sixteen bytes, with gaps between them, and with vectors that are not whole
  // packs; the last number is the dimension in memory.
  const std::vector<std::pair<Extents, std::int64_t>> shapes{
      {{2, 33, 4, 128}, 128}, {{1, 17, 3, 64}, 72}, {{2, 5, 3, 40}, 41},
      {{1, 3, 2, 7}, 7},      {{1, 1, 1, 1}, 1},    {{1, 9, 2, 520}, 520}};
  Random random(61);
  for (const auto& [shape, padded] : shapes) {
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
      // Few of one dtype, few of two, and many take different ways.
      for (const std::size_t count : {0U, 1U, 3U, 7U}) {
        for (const bool mixed : {false, true}) {
          SCOPED_TRACE(to_string(shape) + " " + std::string(name_of(dtype)) + " parts " +
                       std::to_string(count) + (mixed ? " mixed" : ""));
          std::vector<HostState> hosts, wide;
          std::vector<PartialState> there, here;
          for (std::size_t i = 0; i < count; ++i) {
            hosts.emplace_back(random, mixed && i % 2 == 1 ? DType::float32 : dtype, shape, padded);
            const SoftmaxState state = hosts.back().state();
            state.set_lse_at(0, 0, static_cast<std::int64_t>(i) % shape[1], kNothing);
            state.set_lse_at(0, shape[2] - 1, shape[1] - 1, kNothing);
            wide.push_back(widened(hosts.back()));
            there.push_back(corner(state, i));
            here.push_back(corner(wide.back().state(), i));
          }
          for (const DType out : {dtype, DType::float32}) {
            const HostState result(random, out, shape, padded);
            combine_there(there, result);
            const HostState expected(random, DType::float32, shape);
            combine(here, expected.state());
            expect_near(result, expected, out == DType::float32 ? 4e-6 : unit_roundoff(out) * 1.01);
          }
        }
      }
    }
  }
}

TEST_F(CudaSoftmaxState, CombinesInPlaceWithFloat64Lse) {
  Random random(62);
  const Extents shape{1, 9, 3, 64};
  HostState first(random, DType::float32, shape);
  const HostState second(random, DType::float32, shape);
  first.lse = Tensor(DType::float64, first.lse.shape(), test_memory());
  for (std::int64_t i = 0; i < first.lse.view().elements(); ++i) {
    // A fraction that float32 cannot hold beside 8.
    first.lse.view().as<double>()[i] = 8 + 1e-9 * static_cast<double>(i);
  }
  const HostState here = widened(first);
  combine_there({{first.state()}}, first);
  EXPECT_EQ(std::memcmp(first.lse.view().data(), here.lse.view().data(), here.lse.bytes()), 0);
  combine_there({{first.state()}, {second.state()}}, first);
  combine(std::vector<PartialState>{{here.state()}, {second.state()}}, here.state());
  expect_near(first, here, 4e-7);
}

TEST_F(CudaSoftmaxState, CombinesMaximaAsOnTheCpuInBothForms) {
  Random random(69);
  for (const Extents& shape : {Extents{2, 33, 4, 64}, Extents{1, 5, 3, 7}, Extents{1, 1, 1, 1}}) {
    for (const DType lse : {DType::float32, DType::float64}) {
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{3},
                                      static_cast<std::size_t>(kMaximumParts)}) {
        for (const SoftmaxForm form : {SoftmaxForm::normalised, SoftmaxForm::unnormalised}) {
          SCOPED_TRACE(to_string(shape) + " parts " + std::to_string(count));
          std::vector<HostState> states;
          std::vector<PartialState> parts;
          for (std::size_t i = 0; i < count; ++i) {
            states.push_back(with_maximum(random, shape, lse));
            parts.push_back(corner(states.back().state(), i));
          }
          const HostState expected = with_maximum(random, shape, lse);
          combine(parts, expected.state(), form);
          const HostState result = with_maximum(random, shape, lse);
          combine_there(parts, result, form);
          expect_near(result, expected, 8e-6);
          if (count == 0) continue;
          // In place of a part that covers everything.
          combine_there(parts, states[0], form);
          expect_near(states[0], expected, 8e-6);
        }
      }
    }
  }
}

TEST_F(CudaSoftmaxState, RoundsUnnormalisedOutputs) {
  Random random(70);
  const Extents shape{1, 9, 2, 24};
  const HostState first = with_maximum(random, shape, DType::float64);
  const HostState second = with_maximum(random, shape, DType::float64);
  const std::vector<PartialState> parts{{first.state()}, {second.state()}};
  HostState expected = with_maximum(random, shape, DType::float64);
  combine(parts, expected.state(), SoftmaxForm::unnormalised);
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    HostState rounded(random, dtype, shape);
    rounded.maximum = random_tensor(random, DType::float32, rounded.lse.shape());
    combine_there(parts, rounded, SoftmaxForm::unnormalised);
    expect_near(rounded, expected, unit_roundoff(dtype) * 1.01);
  }
}

TEST_F(CudaSoftmaxState, NansAndNothingAmongMaxima) {
  Random random(71);
  const Extents shape{1, 3, 1, 4};  // rows: NaN, only logits of −∞, nothing
  const HostState host = with_maximum(random, shape, DType::float32);
  const float nan = std::nanf("");
  const std::array rows{std::array{nan, nan, nan}, std::array{nan, kNothing, kNothing},
                        std::array{0.0F, kNothing, kNothing}};
  for (std::size_t t = 0; t < rows.size(); ++t) {
    std::fill_n(host.output.view().as<float>() + 4 * t, 4, rows.at(t)[0]);
    host.lse.view().as<float>()[t] = rows.at(t)[1];
    host.maximum.view().as<float>()[t] = rows.at(t)[2];
  }
  const HostState result = with_maximum(random, shape, DType::float32);
  combine_there({{host.state()}}, result, SoftmaxForm::unnormalised);
  const auto* outputs = result.output.view().as<float>();
  const auto* sums = result.lse.view().as<float>();
  const auto* maxima = result.maximum.view().as<float>();
  EXPECT_TRUE(std::isnan(outputs[0]) && std::isnan(sums[0]) && std::isnan(maxima[0]));
  EXPECT_TRUE(std::isnan(outputs[4]));
  EXPECT_EQ(outputs[8], 0);
  for (const int t : {1, 2}) {
    EXPECT_EQ(sums[t], 0);
    EXPECT_EQ(maxima[t], kNothing);
  }
}

TEST_F(CudaSoftmaxState, PartsOfNoWeightYieldToOthersButNotToNothing) {
  Random random(68);
  const Extents shape{1, 3, 2, 16};
  // By the three kernels: few parts of a half type, few, and many.
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    for (const std::size_t empties : {0U, 1U, 6U}) {
      for (const bool weight : {false, true}) {
        std::vector<HostState> hosts;
        for (std::size_t i = 0; i < empties + 1; ++i) {
          hosts.emplace_back(random, dtype, shape);
          const std::vector<float> values(96, i == 0 ? std::nanf("") : 0.0F);
          from_float32(values.data(), dtype, hosts.back().output.view().data(), 96);
          std::fill_n(hosts.back().lse.view().as<float>(), 6, kNothing);
        }
        if (weight) hosts.emplace_back(random, dtype, shape);
        std::vector<PartialState> parts;
        for (const HostState& host : hosts) parts.push_back({host.state()});
        const HostState result(random, dtype, shape);
        combine_there(parts, result);
        const HostState got = widened(result);
        for (std::int64_t i = 0; i < 6; ++i) {
          EXPECT_EQ(std::isnan(got.output.view().as<float>()[16 * i + 5]), !weight);
          EXPECT_EQ(std::isinf(got.lse.view().as<float>()[i]), !weight);
        }
      }
    }
  }
}

TEST_F(CudaSoftmaxState, NotANumberShows) {
  Random random(67);
  const Extents shape{1, 1, 1, 16};
  const HostState good(random, DType::bfloat16, shape);
  const HostState bad(random, DType::bfloat16, shape);
  bad.state().set_lse_at(0, 0, 0, std::nan(""));
  const HostState result(random, DType::bfloat16, shape);
  combine_there({{good.state()}, {bad.state()}}, result);
  EXPECT_TRUE(std::isnan(result.state().lse_at(0, 0, 0)));
  EXPECT_TRUE(std::isnan(*widened(result).output.view().as<float>()));
}

TEST_F(CudaSoftmaxState, ResetsEveryDtypeAndRowsBeyondLengths) {
  Random random(63);
  const Extents shape{4, 5, 3, 40};
  const std::vector<std::int32_t> kept{5, 0, 1, 4};
  const Tensor lengths(DType::int32, {4}, test_memory());
  std::copy(kept.begin(), kept.end(), lengths.view().as<std::int32_t>());
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    for (const bool all : {false, true}) {
      const HostState host(random, dtype, shape, 41);
      const HostState expected = widened(host);
      for (std::int64_t b = 0; b < shape[0]; ++b) {
        const std::int64_t first = all ? 0 : kept[static_cast<std::size_t>(b)];
        const SoftmaxState whole = expected.state();
        combine({}, {whole.output.slice(0, b, 1).slice(1, first, shape[1] - first),
                     whole.lse.slice(0, b, 1).slice(2, first, shape[1] - first)});
      }
      change(host, [&](Mirrors& mirrors, const SoftmaxState& there) {
        if (all) {
          cuda::reset(there, *stream_);
        } else {
          cuda::reset_beyond(mirrors.upload(lengths.view()), there, *stream_);
        }
      });
      expect_near(host, expected, 0);
    }
  }
}

TEST_F(CudaSoftmaxState, RefusesWhatDoesNotFit) {
  Random random(66);
  const Extents shape{1, 2, 3, 8};
  HostState narrow(random, DType::bfloat16, shape);
  const HostState other(random, DType::float16, shape);
  const HostState wide(random, DType::float32, shape);
  const auto refused = [&](const std::vector<PartialState>& parts, const HostState& into,
                           SoftmaxForm form = SoftmaxForm::normalised) {
    EXPECT_THROW(combine_there(parts, into, form), InternalError);
  };
  refused({{narrow.state()}, {other.state()}}, wide);
  refused({{narrow.state(), 1, 0}}, wide);
  refused(std::vector<PartialState>(kMaximumParts + 1, PartialState{wide.state()}), wide);
  // Maxima that are missing or do not fit, and rounded parts beside them.
  constexpr SoftmaxForm kForm = SoftmaxForm::unnormalised;
  const HostState good = with_maximum(random, shape, DType::float32);
  EXPECT_NO_THROW(combine_there({{good.state()}}, good, kForm));
  refused({{good.state()}}, wide, kForm);
  refused({{wide.state()}}, good, kForm);
  HostState short_one = with_maximum(random, shape, DType::float32);
  short_one.maximum = random_tensor(random, DType::float32, {1, 3, 1});
  refused({{good.state()}}, short_one, kForm);
  narrow.maximum = random_tensor(random, DType::float32, narrow.lse.shape());
  refused({{narrow.state()}}, good, kForm);
}

}  // namespace
}  // namespace annulus::test
