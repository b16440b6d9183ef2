// Causal attention over a sequence that the ranks of a program share, on the program's own memory
// and communicator. Query rows are zero, so output row i is the mean of values 0 … i. Value row i
// is i everywhere, so the mean is i / 2, which is checked.
//
//     mpirun -np 4 ./host_attention
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <mpi.h>

#include <annulus/annulus.hpp>

namespace {

/// The largest error of this rank's output rows.
double attend(MPI_Comm communicator) {
  annulus::Context context(communicator, {.place = annulus::Place::host()});
  annulus::AttentionOptions options;
  options.shape = {.batch = 1,
                   .query_length = 1000,  // need not be divisible by the number of ranks
                   .kv_length = 1000,
                   .heads = 8,
                   .kv_heads = 2,
                   .head_dim = 64,
                   .value_dim = 64};
  options.dtype = annulus::DType::float32;
  options.mask.set_causal(true);
  annulus::Attention attention(context, options);

  // This rank's shards: two chunks of the sequence, one from each end.
  std::vector<float> query(attention.query_shape().product(), 0.0F);
  std::vector<float> key(attention.key_shape().product(), 1.0F);
  std::vector<float> value(attention.value_shape().product());
  std::vector<float> output(attention.output_shape().product());
  const annulus::PositionRanges rows = attention.key_positions();
  const auto position = [&](std::int64_t row) {
    return static_cast<double>(rows.global(annulus::LocalPosition(row)).value());
  };
  const std::int64_t value_row = 2 * 64;
  for (std::int64_t row = 0; row < rows.size(); ++row) {
    std::fill_n(value.begin() + row * value_row, value_row, static_cast<float>(position(row)));
  }

  attention.run({query.data(), key.data(), value.data(), output.data()});

  double worst = 0;
  const std::int64_t output_row = 8 * 64;
  for (std::int64_t i = 0; i < rows.size() * output_row; ++i) {
    const double error = std::abs(output[i] - position(i / output_row) / 2);
    worst = std::isnan(error) ? error : std::max(worst, error);
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
