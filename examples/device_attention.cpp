// Causal attention on GPU memory of the program's own, one rank per GPU. Query rows are zero, so
// output row i is the mean of values 0 … i; values are 1 at even positions and 0 at odd ones, so
// that mean is known, and it is checked.
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

#include <annulus/core/cuda.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/sharded_attention.hpp>

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

/// The largest error of this rank's output rows.
double attend(MPI_Comm communicator, int gpu) {
  using namespace annulus;
  int size = 0;
  MPI_Comm_size(communicator, &size);
  Mesh mesh(MeshShape::parse("sp=-1", size), communicator, Watchdog(std::chrono::seconds(300)));

  AttentionProblem problem;
  problem.shape = {.batch = 1,
                   .query_length = kLength,
                   .kv_length = kLength,
                   .heads = kHeads,
                   .kv_heads = kKvHeads,
                   .head_dim = kHeadDim,
                   .value_dim = kHeadDim};
  problem.dtype = DType::bfloat16;
  problem.mask.set_causal(true);
  const auto spec = PartitionSpec::parse("-,sp,-,-");  // [batch, sequence, heads, dim]
  const auto operands =
      ring::shard_operands(problem, mesh.shape(), {spec, spec, LayoutKind::zigzag, 1});

  const auto device = make_cuda_device(gpu);
  const PositionRanges rows = operands.key.positions(mesh.rank(), 1);
  const std::int64_t length = rows.size();
  const auto position = [&](std::int64_t row) { return rows.global(LocalPosition(row)).value(); };
  std::vector<Bfloat16> values(static_cast<std::size_t>(length * kKvHeads * kHeadDim), 0);
  for (std::int64_t row = 0; row < length; ++row) {
    if (position(row) % 2 == 0) {
      std::fill_n(values.begin() + row * kKvHeads * kHeadDim, kKvHeads * kHeadDim, kOne);
    }
  }
  std::vector<Bfloat16> outputs(static_cast<std::size_t>(length * kHeads * kHeadDim), 0);
  Bfloat16* query = to_device(outputs);  // zeros
  Bfloat16* output = to_device(outputs);
  Bfloat16* key = to_device(values);
  Bfloat16* value = to_device(values);
  float* lse = to_device(std::vector<float>(static_cast<std::size_t>(kHeads * length)));

  const Place place = device->place();
  const DType dtype = problem.dtype;
  const Registry registry = Registry::standard();
  ring::ShardedAttention attention(problem, operands, mesh, registry, *device, {});
  attention.run({{query, dtype, {1, length, kHeads, kHeadDim}, place},
                 {key, dtype, {1, length, kKvHeads, kHeadDim}, place},
                 {value, dtype, {1, length, kKvHeads, kHeadDim}, place},
                 {output, dtype, {1, length, kHeads, kHeadDim}, place},
                 {lse, DType::float32, {1, kHeads, length}, place}});

  check(cudaMemcpy(outputs.data(), output, outputs.size() * sizeof(Bfloat16),
                   cudaMemcpyDeviceToHost));
  double worst = 0;
  for (std::int64_t i = 0; i < length * kHeads * kHeadDim; ++i) {
    const auto seen = static_cast<double>(position(i / (kHeads * kHeadDim)) + 1);
    const double expected = std::ceil(seen / 2) / seen;
    const float actual = to_float(outputs[static_cast<std::size_t>(i)]);
    worst = std::fmax(worst, std::abs(static_cast<double>(actual) - expected));
  }
  for (void* data : {static_cast<void*>(query), static_cast<void*>(key), static_cast<void*>(value),
                     static_cast<void*>(output), static_cast<void*>(lse)}) {
    check(cudaFree(data));
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm communicator = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &communicator);
  int rank = 0;
  MPI_Comm_rank(communicator, &rank);

  // This rank's GPU: as many as it has neighbours before it on its node.
  MPI_Comm node = MPI_COMM_NULL;
  MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
  int gpu = 0;
  MPI_Comm_rank(node, &gpu);
  MPI_Comm_free(&node);
  int has_gpu = gpu < static_cast<int>(annulus::cuda_devices().size()) ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &has_gpu, 1, MPI_INT, MPI_MIN, communicator);

  int exit_code = 77;
  if (has_gpu == 1) {
    double worst = attend(communicator, gpu);
    MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_DOUBLE, MPI_MAX, communicator);
    if (rank == 0) std::printf("largest error %.1e\n", worst);
    exit_code = worst < 4e-3 ? 0 : 1;  // bfloat16 has 8 bits
  } else if (rank == 0) {
    std::printf("not every rank has a GPU\n");
  }
  MPI_Comm_free(&communicator);
  MPI_Finalize();
  return exit_code;
}
