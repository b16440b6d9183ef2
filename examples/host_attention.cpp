// Causal attention over a sequence that the ranks of a program share, on memory and under a
// communicator of the program's own. Query rows are zero, so output row i is the mean of values
// 0 … i; value row i is i everywhere, so that mean is i / 2, which is checked.
//
//     mpirun -np 4 ./host_attention
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <mpi.h>

#include <annulus/core/device.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/sharded_attention.hpp>

namespace {

constexpr std::int64_t kLength = 1000;  // need not divide by the number of ranks
constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kHeadDim = 64;

/// The largest error of this rank's output rows.
double attend(MPI_Comm communicator) {
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
  problem.mask.set_causal(true);
  const auto spec = PartitionSpec::parse("-,sp,-,-");  // [batch, sequence, heads, dim]
  const auto operands =
      ring::shard_operands(problem, mesh.shape(), {spec, spec, LayoutKind::zigzag, 1});

  // Which rows of the sequence this rank holds: two chunks, one from each end.
  const PositionRanges rows = operands.key.positions(mesh.rank(), 1);
  const std::int64_t length = rows.size();
  std::vector<float> query(length * kHeads * kHeadDim, 0.0F);
  std::vector<float> key(length * kKvHeads * kHeadDim, 1.0F);
  std::vector<float> value(length * kKvHeads * kHeadDim);
  std::vector<float> output(length * kHeads * kHeadDim);
  std::vector<float> lse(kHeads * length);
  const auto position = [&](std::int64_t row) { return rows.global(LocalPosition(row)).value(); };
  for (std::int64_t row = 0; row < length; ++row) {
    std::fill_n(value.begin() + row * kKvHeads * kHeadDim, kKvHeads * kHeadDim,
                static_cast<float>(position(row)));
  }

  HostDevice device;
  const Registry registry = Registry::standard();
  ring::ShardedAttention attention(problem, operands, mesh, registry, device, {});
  attention.run({{query.data(), DType::float32, {1, length, kHeads, kHeadDim}},
                 {key.data(), DType::float32, {1, length, kKvHeads, kHeadDim}},
                 {value.data(), DType::float32, {1, length, kKvHeads, kHeadDim}},
                 {output.data(), DType::float32, {1, length, kHeads, kHeadDim}},
                 {lse.data(), DType::float32, {1, kHeads, length}}});

  double worst = 0;
  for (std::int64_t i = 0; i < length * kHeads * kHeadDim; ++i) {
    const auto expected = static_cast<double>(position(i / (kHeads * kHeadDim))) / 2;
    worst = std::fmax(worst, std::abs(output[i] - expected));
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm communicator = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &communicator);
  double worst = attend(communicator);
  MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_DOUBLE, MPI_MAX, communicator);

  int rank = 0;
  MPI_Comm_rank(communicator, &rank);
  if (rank == 0) std::printf("largest error %.1e\n", worst);
  MPI_Comm_free(&communicator);
  MPI_Finalize();
  return worst < 1e-3 ? 0 : 1;
}
