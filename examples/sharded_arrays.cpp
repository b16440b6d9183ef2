// Sharded arrays without attention: functions that run on every shard, and an array that moves from
// one sharding to another. An array [tokens, features], sharded by tokens, is centred: the
// mean over all tokens is subtracted. It is then resharded by features, so that each rank has all
// tokens of some features. Entry (t, f) is t · (f + 1), so the results are known, and they are
// checked.
//
//     mpirun -np 4 ./sharded_arrays
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <mpi.h>

#include <annulus/annulus.hpp>

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

/// Returns the sums [F] of the local rows [t,F].
std::vector<Tensor> add_up(const ConstTensorView& rows, annulus::MemoryPool& memory) {
  std::vector<Tensor> results;
  results.emplace_back(DType::float64, annulus::Extents{kFeatures}, memory);
  results[0].fill_zero();
  for (std::int64_t i = 0; i < rows.size(0); ++i) {
    for (std::int64_t j = 0; j < kFeatures; ++j) {
      results[0].view().at<double>({j}) += rows.at<float>({i, j});
    }
  }
  return results;
}

/// Returns the centred local rows [t,F], given the sums [F] of the rows of all ranks.
std::vector<Tensor> centre(const ConstTensorView& rows, const ConstTensorView& sums,
                           annulus::MemoryPool& memory) {
  std::vector<Tensor> results;
  results.emplace_back(DType::float32, rows.shape(), memory);
  for (std::int64_t i = 0; i < rows.size(0); ++i) {
    for (std::int64_t j = 0; j < kFeatures; ++j) {
      results[0].view().at<float>({i, j}) =
          static_cast<float>(rows.at<float>({i, j}) - sums.at<double>({j}) / kTokens);
    }
  }
  return results;
}

/// Returns the largest error on this rank.
double run(MPI_Comm communicator) {
  annulus::Context context(communicator, {.place = annulus::Place::host()});
  const annulus::MeshShape& mesh = context.mesh_shape();  // all ranks on the axis sp
  annulus::MemoryPool& memory = context.memory();

  // Zigzag: two chunks of the tokens, one from each end.
  const PartitionSpec by_token = PartitionSpec::parse("sp,-");
  const std::vector<Distribution> zigzag{Distribution::sequence(annulus::LayoutKind::zigzag)};
  const NamedSharding tokens(mesh, by_token, {kTokens, kFeatures}, zigzag);
  ShardedTensor array(tokens, context.rank(), DType::float32, memory);
  for_each_entry(tokens, context.rank(), [&](auto i, auto j, auto token, auto feature) {
    array.local().at<float>({i, j}) = static_cast<float>(token * (feature + 1));
  });

  // Each rank has a term of the sums, and gets all of them added up.
  annulus::ShardSpec summed{PartitionSpec()};
  summed.summed = {"sp"};
  const annulus::ShardMap adding{.body = [&](auto shards) { return add_up(shards[0], memory); },
                                 .in_specs = {{by_token, zigzag}},
                                 .out_specs = {summed}};
  const std::vector<ShardedTensor> sums = shard_map(context, adding, {array});
  // A spec that names no axis takes what is equal on all ranks.
  const annulus::ShardMap centring{
      .body = [&](auto shards) { return centre(shards[0], shards[1], memory); },
      .in_specs = {{by_token, zigzag}, PartitionSpec()},
      .out_specs = {{by_token, zigzag}}};
  const std::vector<ShardedTensor> centred = shard_map(context, centring, {array, sums[0]});

  // If the number of ranks does not divide the features, the corrected spec shards nothing.
  const PartitionSpec by_feature =
      corrected_spec(PartitionSpec::parse("-,sp"), mesh, {kTokens, kFeatures}).spec;
  const NamedSharding features(mesh, by_feature, {kTokens, kFeatures});
  ShardedTensor moved(features, context.rank(), DType::float32, memory);
  reshard(context, centred[0].sharding(), centred[0].local(), features, moved.local());

  double worst = 0;
  const auto check = [&worst](double found, double expected) {
    const double error = std::abs(found - expected) / kTokens;
    if (!(error <= worst)) worst = error;
  };
  for_each_entry(features, context.rank(), [&](auto i, auto j, auto token, auto feature) {
    check(moved.local().at<float>({i, j}),
          (static_cast<double>(token) - kMeanToken) * static_cast<double>(feature + 1));
  });
  for (std::int64_t j = 0; j < kFeatures; ++j) {
    check(sums[0].local().at<double>({j}) / kTokens, kMeanToken * static_cast<double>(j + 1));
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
