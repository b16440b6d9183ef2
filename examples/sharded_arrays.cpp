// Sharded arrays without attention: a function that runs on every shard, and an array that moves
// from one sharding to another. An array [tokens, features], sharded by tokens, is centred: the
// mean over all tokens is subtracted. It is then resharded by features, so that each rank has all
// tokens of some features. Entry (t, f) is t · (f + 1), so the results are known, and they are
// checked.
//
//     mpirun -np 4 ./sharded_arrays
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <span>
#include <utility>
#include <vector>

#include <mpi.h>

#include <annulus/annulus.hpp>
#include <annulus/partition/reshard.hpp>
#include <annulus/partition/shard_map.hpp>

namespace {

using annulus::ConstTensorView;
using annulus::Distribution;
using annulus::DType;
using annulus::LocalPosition;
using annulus::NamedSharding;
using annulus::PartitionSpec;
using annulus::ShardedTensor;
using annulus::Tensor;

constexpr std::int64_t kTokens = 1001;  // need not be divisible by the number of ranks
constexpr std::int64_t kFeatures = 12;
constexpr double kMeanToken = (kTokens - 1) / 2.0;

/// Calls body(local row, local column, global row, global column) for each entry of a shard.
template <class Body>
void for_each_entry(const NamedSharding& sharding, int rank, const Body& body) {
  const annulus::PositionRanges rows = sharding.positions(rank, 0);
  const annulus::PositionRanges columns = sharding.positions(rank, 1);
  for (std::int64_t i = 0; i < rows.size(); ++i) {
    for (std::int64_t j = 0; j < columns.size(); ++j) {
      body(i, j, rows.global(LocalPosition(i)).value(), columns.global(LocalPosition(j)).value());
    }
  }
}

/// Returns the centred local rows [t,F], and the mean [F] over the rows of all ranks.
std::vector<Tensor> centre(const ConstTensorView& rows, annulus::Mesh& mesh,
                           annulus::MemoryPool& memory) {
  std::vector<double> sums(kFeatures, 0.0);
  for (std::int64_t i = 0; i < rows.size(0); ++i) {
    for (std::int64_t j = 0; j < kFeatures; ++j) sums[j] += rows.at<float>({i, j});
  }
  sums = mesh.world().sum(sums);
  std::vector<Tensor> results;
  results.emplace_back(DType::float32, rows.shape(), memory);
  results.emplace_back(DType::float32, annulus::Extents{kFeatures}, memory);
  for (std::int64_t j = 0; j < kFeatures; ++j) {
    const double mean = sums[j] / kTokens;
    results[1].view().at<float>({j}) = static_cast<float>(mean);
    for (std::int64_t i = 0; i < rows.size(0); ++i) {
      results[0].view().at<float>({i, j}) = static_cast<float>(rows.at<float>({i, j}) - mean);
    }
  }
  return results;
}

/// Returns the largest error on this rank.
double run(MPI_Comm communicator) {
  annulus::Context context(communicator, {.place = annulus::Place::host()});
  annulus::Mesh& mesh = context.mesh();  // all ranks on the axis sp
  annulus::MemoryPool& memory = context.device().memory();
  const auto stream = context.device().make_stream("example", mesh.watchdog(), nullptr);

  // Zigzag: two chunks of the tokens, one from each end.
  const PartitionSpec by_token = PartitionSpec::parse("sp,-");
  const std::vector<Distribution> zigzag{Distribution::sequence(annulus::LayoutKind::zigzag)};
  const NamedSharding tokens(mesh.shape(), by_token, {kTokens, kFeatures}, zigzag);
  ShardedTensor array(tokens, mesh.rank(), DType::float32, memory);
  for_each_entry(tokens, mesh.rank(), [&](auto i, auto j, auto token, auto feature) {
    array.local().at<float>({i, j}) = static_cast<float>(token * (feature + 1));
  });

  // The spec of the mean names no axis. This promises equal values on all ranks, and is checked.
  const annulus::ShardMap centring{
      .body = [&](auto shards) { return centre(shards[0], mesh, memory); },
      .in_specs = {{by_token, zigzag}},
      .out_specs = {{by_token, zigzag}, PartitionSpec()}};
  const std::vector<ShardedTensor> results =
      shard_map(mesh, context.device(), *stream, centring, {array});
  const ShardedTensor& centred = results[0];

  // If the number of ranks does not divide the features, the corrected spec shards nothing.
  const PartitionSpec by_feature =
      corrected_spec(PartitionSpec::parse("-,sp"), mesh.shape(), {kTokens, kFeatures}).spec;
  const NamedSharding features(mesh.shape(), by_feature, {kTokens, kFeatures});
  ShardedTensor moved(features, mesh.rank(), DType::float32, memory);
  reshard(mesh, context.device(), *stream, centred.sharding(), centred.local(), features,
          moved.local());

  double worst = 0;
  const auto check = [&worst](float found, double expected) {
    const double error = std::abs(found - expected) / kTokens;
    if (!(error <= worst)) worst = error;
  };
  for_each_entry(features, mesh.rank(), [&](auto i, auto j, auto token, auto feature) {
    check(moved.local().at<float>({i, j}),
          (static_cast<double>(token) - kMeanToken) * static_cast<double>(feature + 1));
  });
  for (std::int64_t j = 0; j < kFeatures; ++j) {
    check(results[1].local().at<float>({j}), kMeanToken * static_cast<double>(j + 1));
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm communicator = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &communicator);
  double worst = run(communicator);
  MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_DOUBLE, MPI_MAX, communicator);

  int rank = 0;
  MPI_Comm_rank(communicator, &rank);
  if (rank == 0) std::printf("largest error %.1e\n", worst);
  MPI_Comm_free(&communicator);
  MPI_Finalize();
  return worst < 1e-5 ? 0 : 1;
}
