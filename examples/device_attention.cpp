// Causal attention on the program's own GPU memory and stream, one rank per GPU. Query rows are
// zero, so output row i is the mean of values 0 … i. Values are 1 at even positions and 0 at odd
// positions, so the mean is known, and the program checks it.
//
//     mpirun -np 4 --bind-to none ./device_attention      exit code 77: no GPU for every rank
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <cuda_runtime_api.h>
#include <stdexcept>
#include <vector>

#include <mpi.h>

#include <annulus/annulus.hpp>

namespace {

using Bfloat16 = std::uint16_t;  // as bits
constexpr Bfloat16 kOne = 0x3F80;
constexpr std::int64_t kLength = 4096;
constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kHeadDim = 128;

void check(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}

/// Memory of the current GPU, with the contents of `values`.
template <class T>
T* to_device(const std::vector<T>& values) {
  T* data = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&data), values.size() * sizeof(T)));
  check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

float to_float(Bfloat16 bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16U;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

/// The largest error of this rank's output rows. `microseconds`: how long the host takes to enqueue
/// a call that is replayed.
double attend(MPI_Comm communicator, cudaStream_t stream, double& microseconds) {
  annulus::Context context(communicator);  // on the current device
  annulus::AttentionOptions options;
  options.shape = {.batch = 1,
                   .query_length = kLength,
                   .kv_length = kLength,
                   .heads = kHeads,
                   .kv_heads = kKvHeads,
                   .head_dim = kHeadDim,
                   .value_dim = kHeadDim};
  options.mask.set_causal(true);
  annulus::Attention attention(context, options);

  const annulus::PositionRanges rows = attention.key_positions();
  const auto position = [&](std::int64_t row) {
    return rows.global(annulus::LocalPosition(row)).value();
  };
  std::vector<Bfloat16> values(static_cast<std::size_t>(attention.value_shape().product()), 0);
  for (std::int64_t row = 0; row < rows.size(); ++row) {
    if (position(row) % 2 == 0) {
      std::fill_n(values.begin() + row * kKvHeads * kHeadDim, kKvHeads * kHeadDim, kOne);
    }
  }
  std::vector<Bfloat16> outputs(static_cast<std::size_t>(attention.output_shape().product()), 0);
  Bfloat16* query = to_device(outputs);  // zeros
  Bfloat16* output = to_device(outputs);
  Bfloat16* key = to_device(values);
  Bfloat16* value = to_device(values);

  for (int call = 0; call < 20; ++call) {
    const auto begin = std::chrono::steady_clock::now();
    attention.run({query, key, value, output}, stream);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    microseconds = call == 0 ? time.count() : std::min(microseconds, time.count());
  }
  check(cudaMemcpyAsync(outputs.data(), output, outputs.size() * sizeof(Bfloat16),
                        cudaMemcpyDeviceToHost, stream));
  attention.wait();
  check(cudaStreamSynchronize(stream));

  double worst = 0;
  for (std::int64_t i = 0; i < attention.output_shape().product(); ++i) {
    const auto seen = static_cast<double>(position(i / (kHeads * kHeadDim)) + 1);
    const double expected = std::ceil(seen / 2) / seen;
    const float actual = to_float(outputs[static_cast<std::size_t>(i)]);
    const double error = std::abs(static_cast<double>(actual) - expected);
    worst = std::isnan(error) ? error : std::fmax(worst, error);
  }
  for (Bfloat16* data : {query, key, value, output}) check(cudaFree(data));
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm communicator = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &communicator);
  int rank = 0;
  MPI_Comm_rank(communicator, &rank);

  // This rank's GPU: its number among the ranks of its node.
  MPI_Comm node = MPI_COMM_NULL;
  MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
  int gpu = 0;
  MPI_Comm_rank(node, &gpu);
  MPI_Comm_free(&node);
  int gpus = 0;
  int has_gpu = cudaGetDeviceCount(&gpus) == cudaSuccess && gpu < gpus ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &has_gpu, 1, MPI_INT, MPI_MIN, communicator);

  int exit_code = 77;
  if (has_gpu == 1) {
    check(cudaSetDevice(gpu));
    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream));
    double microseconds = 0;
    double worst = attend(communicator, stream, microseconds);
    check(cudaStreamDestroy(stream));
    MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_DOUBLE, MPI_MAX, communicator);
    MPI_Allreduce(MPI_IN_PLACE, &microseconds, 1, MPI_DOUBLE, MPI_MAX, communicator);
    if (rank == 0) {
      std::printf("largest error %.1e, a call enqueued in %.1f us\n", worst, microseconds);
    }
    exit_code = worst < 4e-3 ? 0 : 1;  // bfloat16 has 8 bits
  } else if (rank == 0) {
    std::printf("not every rank has a GPU\n");
  }
  MPI_Comm_free(&communicator);
  MPI_Finalize();
  return exit_code;
}
