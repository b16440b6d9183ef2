// The native kernel and the merge alone, on one rank. Rates count the operations of visible pairs,
// so they compare with the rate of the plain matrix product ("sgemm"), which bounds them.
#include <cstdint>
#include <random>
#include <vector>

#include <benchmark/benchmark.h>
#include <cblas.h>

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
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(shape.product()));
  for (float& value : values) value = normal(random);
  Tensor tensor(dtype, shape, pool());
  from_float32(values.data(), dtype, tensor.view().data(), shape.product());
  return tensor;
}

void report_rate(benchmark::State& state, double operations) {
  state.counters["GFLOP/s"] =
      benchmark::Counter(operations * 1e-9, benchmark::Counter::kIsIterationInvariantRate,
                         benchmark::Counter::kIs1000);
}

// What one core can do at best.
void sgemm(benchmark::State& state) {
  openblas_set_num_threads(1);
  const auto n = static_cast<blasint>(state.range(0));
  const Tensor a = random_tensor(DType::float32, {n, n}, 1);
  const Tensor b = random_tensor(DType::float32, {n, n}, 2);
  const Tensor c(DType::float32, {n, n}, pool());
  for (auto _ : state) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0F, a.view().as<float>(), n,
                b.view().as<float>(), n, 0.0F, c.view().as<float>(), n);
    benchmark::ClobberMemory();
  }
  report_rate(state, 2.0 * n * n * n);
}
BENCHMARK(sgemm)->Arg(1024)->Unit(benchmark::kMillisecond);

void native(benchmark::State& state, DType dtype, bool causal) {
  const std::int64_t length = state.range(0);
  const std::int64_t dim = state.range(1);
  AttentionProblem problem;
  problem.shape = {1, length, length, 4, 2, dim, dim};
  problem.dtype = dtype;
  problem.mask.set_causal(causal);
  const Tensor query = random_tensor(dtype, {1, length, 4, dim}, 1);
  const Tensor key = random_tensor(dtype, {1, length, 2, dim}, 2);
  const Tensor value = random_tensor(dtype, {1, length, 2, dim}, 3);
  const Tensor output(DType::float32, {1, length, 4, dim}, pool());
  const Tensor lse(DType::float32, {1, 4, length}, pool());
  const PositionRanges all = PositionRanges::all(length);
  const AttentionBlock block{query.view(), key.view(), value.view(), all, all};
  HostStream stream("compute", Watchdog(Watchdog::Seconds(60)), nullptr);
  const ExecutionContext context{stream, nullptr, static_cast<int>(state.range(2))};
  const Registry registry = Registry::standard();
  HostDevice device;
  const auto kernel = registry.get("native").make_kernel(problem, device);
  for (auto _ : state) {
    kernel->forward(block, {output.view(), lse.view()}, context);
  }
  const PositionRange range = all.ranges().front();
  const auto pairs = static_cast<double>(problem.mask.examine(0, 1, range, range).pairs);
  report_rate(state, forward_flops(problem.shape, pairs));
}

void native_sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"S", "D", "threads"})->Unit(benchmark::kMillisecond)->UseRealTime();
  for (const std::int64_t dim : {64, 128}) {
    for (const std::int64_t threads : {1, 2}) benchmark->Args({4096, dim, threads});
  }
}
BENCHMARK_CAPTURE(native, float32, DType::float32, false)->Apply(native_sizes);
BENCHMARK_CAPTURE(native, float32_causal, DType::float32, true)->Apply(native_sizes);
BENCHMARK_CAPTURE(native, bfloat16, DType::bfloat16, false)->Apply(native_sizes);
BENCHMARK_CAPTURE(native, float16, DType::float16, false)->Apply(native_sizes);

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
BENCHMARK(combine_states)->ArgNames({"T", "Dv"})->Args({4096, 64})->Args({4096, 128});

}  // namespace
}  // namespace annulus

BENCHMARK_MAIN();
