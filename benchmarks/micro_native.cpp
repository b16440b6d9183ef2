// The native kernel and the merge alone, on one rank. Rates count the operations of visible pairs:
// compare them with the plain matrix product ("sgemm"), and masked rates with the rates of "full".
//
//   annulus_micro [--threads=N] [--benchmark_filter=native/bfloat16/causal/4096/64 …]
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>
#include <cblas.h>
#include <fmt/format.h>

#include <annulus/attention/registry.hpp>
#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/core/host_stream.hpp>

namespace annulus {
namespace {

HostMemoryPool& pool() {
  static HostMemoryPool memory;
  return memory;
}

Tensor random_tensor(DType dtype, const Extents& shape, unsigned seed) {
  // A million normal numbers, repeated: a bias has 134 million, which would take long to draw.
  constexpr std::int64_t kPeriod = 1 << 20;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(kPeriod);
  for (float& value : values) value = normal(random);
  Tensor tensor(dtype, shape, pool());
  auto* const data = static_cast<std::byte*>(tensor.view().data());
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  for (std::int64_t begin = 0; begin < shape.product(); begin += kPeriod) {
    from_float32(values.data(), dtype, data + begin * size,
                 std::min(kPeriod, shape.product() - begin));
  }
  return tensor;
}

void report_rate(benchmark::State& state, double operations) {
  state.counters["GFLOP/s"] =
      benchmark::Counter(operations * 1e-9, benchmark::Counter::kIsIterationInvariantRate,
                         benchmark::Counter::kIs1000);
}

void sgemm(benchmark::State& state, int threads) {
  const int before = openblas_get_num_threads();
  openblas_set_num_threads(threads);
  const auto n = static_cast<blasint>(state.range(0));
  const Tensor a = random_tensor(DType::float32, {n, n}, 1);
  const Tensor b = random_tensor(DType::float32, {n, n}, 2);
  const Tensor c(DType::float32, {n, n}, pool());
  for (auto _ : state) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0F, a.view().as<float>(), n,
                b.view().as<float>(), n, 0.0F, c.view().as<float>(), n);
    benchmark::ClobberMemory();
  }
  openblas_set_num_threads(before);
  report_rate(state, 2.0 * n * n * n);
}

// Adds a mask or modifier to a problem of `length` positions.
using Change = std::function<void(AttentionProblem& problem, std::int64_t length)>;

// The entries of a random bias and of a causal dense mask.
struct Scores {
  explicit Scores(const AttentionProblem& problem) {
    if (problem.bias) bias = random_tensor(DType::float32, *problem.bias, 4);
    if (!problem.dense_mask) return;
    mask = Tensor(DType::boolean, *problem.dense_mask, pool());
    const std::int64_t length = problem.shape.kv_length;
    auto* const entries = static_cast<std::uint8_t*>(mask.view().data());
    for (std::int64_t i = 0; i < mask.view().elements(); ++i) {
      entries[i] = i % length <= i / length % length ? 1 : 0;
    }
  }
  [[nodiscard]] ScoreTensors views(const AttentionProblem& problem) const {
    const AttentionShape& s = problem.shape;
    return broadcast_scores(problem.bias ? bias.view() : TensorView(),
                            problem.dense_mask ? mask.view() : TensorView(),
                            {s.batch, s.heads, s.query_length, s.kv_length});
  }
  [[nodiscard]] static double visible(const AttentionProblem& problem) {
    const auto length = static_cast<double>(problem.shape.kv_length);
    return problem.dense_mask ? (length + 1) / (2 * length) : 1;
  }
  Tensor bias, mask;
};

// A problem that a benchmark asks for, with its kernel.
struct Benchmarked {
  Benchmarked(const benchmark::State& state, DType dtype, const Change& change, int threads)
      : problem(problem_of(state, dtype, change)),
        shape{1, problem.shape.query_length, problem.shape.heads, problem.shape.head_dim},
        query(random_tensor(dtype, shape, 1)),
        key(random_tensor(dtype, shape, 2)),
        value(random_tensor(dtype, shape, 3)),
        lse(DType::float32, {1, shape[2], shape[1]}, pool()),
        all(PositionRanges::all(shape[1])),
        scores(problem),
        stream("compute", Watchdog(Watchdog::Seconds(60)), nullptr),
        context{stream, nullptr, threads},
        kernel(registry.get("native").make_kernel(problem, device)) {}

  static AttentionProblem problem_of(const benchmark::State& state, DType dtype,
                                     const Change& change) {
    constexpr std::int64_t kHeads = 8;
    const std::int64_t length = state.range(0);
    const std::int64_t dim = state.range(1);
    AttentionProblem problem;
    problem.shape = {1, length, length, kHeads, kHeads, dim, dim};
    problem.dtype = dtype;
    change(problem, length);
    problem.validate();
    return problem;
  }
  [[nodiscard]] double flops() const {
    const PositionRange range = all.ranges().front();
    return forward_flops(problem.shape,
                         static_cast<double>(problem.mask.examine(0, 1, range, range).pairs) *
                             scores.visible(problem));
  }

  AttentionProblem problem;
  Extents shape;
  Tensor query, key, value, lse;
  PositionRanges all;
  Scores scores;
  HostStream stream;
  ExecutionContext context;
  Registry registry = Registry::standard();
  HostDevice device;
  std::unique_ptr<Kernel> kernel;
};

void native(benchmark::State& state, DType dtype, const Change& change, int threads) {
  const Benchmarked one(state, dtype, change, threads);
  const Tensor output(DType::float32, one.shape, pool());
  AttentionBlock block{one.query.view(), one.key.view(), one.value.view(), one.all, one.all};
  block.scores = one.scores.views(one.problem);
  for (auto _ : state) {
    one.kernel->forward(block, {output.view(), one.lse.view()}, one.context);
  }
  report_rate(state, one.flops());
}

// Its gradients: five products for the forward pass's two. LSE and delta do not come from an
// output.
void native_backward(benchmark::State& state, DType dtype, const Change& change, int threads) {
  const Benchmarked one(state, dtype, change, threads);
  const Tensor grad_output = random_tensor(dtype, one.shape, 5);
  const Tensor delta = random_tensor(DType::float32, one.lse.shape(), 6);
  std::fill_n(one.lse.view().as<float>(), one.lse.shape().product(),
              std::log(static_cast<float>(one.shape[1])));
  const Tensor grad_query = random_tensor(DType::float32, one.shape, 7);
  const Tensor grad_key = random_tensor(DType::float32, one.shape, 8);
  const Tensor grad_value = random_tensor(DType::float32, one.shape, 9);
  BackwardBlock block{one.query.view(), one.key.view(), one.value.view(), grad_output.view(),
                      one.lse.view(),   delta.view(),   one.all,          one.all};
  block.scores = one.scores.views(one.problem);
  const Gradients gradients{grad_query.view(), grad_key.view(), grad_value.view()};
  for (auto _ : state) one.kernel->backward(block, gradients, one.context);
  report_rate(state, 2.5 * one.flops());
}

// Documents of a quarter, three quarters, … of 512 positions.
std::vector<std::int32_t> documents(std::int64_t length) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(length));
  std::int64_t end = 0;
  std::int32_t id = -1;
  for (std::int64_t i = 0; i < length; ++i) {
    if (i == end) end += 128 + 256 * (++id % 5);
    ids[static_cast<std::size_t>(i)] = id;
  }
  return ids;
}

const std::vector<std::pair<std::string, Change>>& changes() {
  static const std::vector<std::pair<std::string, Change>> all{
      {"full", [](AttentionProblem&, std::int64_t) {}},
      {"causal", [](AttentionProblem& p, std::int64_t) { p.mask.set_causal(true); }},
      {"window", [](AttentionProblem& p, std::int64_t) { p.mask.set_window(1024, 0); }},
      {"segments", [](AttentionProblem& p,
                      std::int64_t s) { p.mask.set_segments(1, documents(s), documents(s)); }},
      {"lengths",
       [](AttentionProblem& p, std::int64_t s) {
         p.mask.set_query_lengths({static_cast<std::int32_t>(s - 100)});
         p.mask.set_kv_lengths({static_cast<std::int32_t>(s - 333)});
       }},
      {"blocks",
       [](AttentionProblem& p, std::int64_t s) {
         p.mask.set_block_mask(BlockMask::random(s, s, 1, 0.5, 1, {128, 128}));
       }},
      {"soft_cap", [](AttentionProblem& p, std::int64_t) { p.soft_cap = 20.0; }},
      {"bias",
       [](AttentionProblem& p, std::int64_t s) {
         p.bias = Extents{1, p.shape.heads, s, s};
       }},
      {"dense_mask",
       [](AttentionProblem& p, std::int64_t s) {
         p.dense_mask = Extents{1, 1, s, s};
       }},
      {"dropout", [](AttentionProblem& p, std::int64_t) { p.dropout.emplace(0.1, 1); }},
  };
  return all;
}

void combine_states(benchmark::State& state) {
  const std::int64_t length = state.range(0);
  const std::int64_t dim = state.range(1);
  const Extents shape{1, length, 8, dim};
  const Tensor output = random_tensor(DType::float32, shape, 1);
  const Tensor partial = random_tensor(DType::float32, shape, 2);
  const Tensor lse = random_tensor(DType::float32, {1, 8, length}, 3);
  const Tensor partial_lse = random_tensor(DType::float32, {1, 8, length}, 4);
  const SoftmaxState whole{output.view(), lse.view()};
  const std::vector<PartialState> parts{{whole, 0, 0},
                                        {{partial.view(), partial_lse.view()}, 0, 0}};
  for (auto _ : state) combine(parts, whole);
  // Two reads and a write.
  state.SetBytesProcessed(static_cast<std::int64_t>(3 * output.bytes()) *
                          static_cast<std::int64_t>(state.iterations()));
}

void register_all(int threads) {
  benchmark::RegisterBenchmark("sgemm", sgemm, threads)
      ->Arg(2048)
      ->Unit(benchmark::kMillisecond)
      ->UseRealTime()
      ->MeasureProcessCPUTime();
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    for (const auto& [name, change] : changes()) {
      for (const bool backward : {false, true}) {
        auto* const added = benchmark::RegisterBenchmark(
            fmt::format("native{}/{}/{}", backward ? "_backward" : "", name_of(dtype), name)
                .c_str(),
            backward ? native_backward : native, dtype, change, threads);
        added->Unit(benchmark::kMillisecond)->UseRealTime()->MeasureProcessCPUTime();
        for (const std::int64_t length : {4096, 8192}) {
          for (const std::int64_t dim : {64, 128}) added->Args({length, dim});
        }
      }
    }
  }
  benchmark::RegisterBenchmark("combine_states", combine_states)
      ->ArgNames({"T", "Dv"})
      ->Args({4096, 64})
      ->Args({4096, 128});
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  int threads = 1;
  const std::string option = "--threads=";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (!argument.starts_with(option)) continue;
    threads = std::stoi(argument.substr(option.size()));
    std::rotate(argv + i, argv + i + 1, argv + argc);
    --argc;
    break;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  annulus::register_all(threads);
  benchmark::RunSpecifiedBenchmarks();
}
