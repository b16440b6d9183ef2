#include <memory>

#include <fmt/format.h>

#include <annulus/attention/attention_weights.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/partition/reshard.hpp>
#include <annulus/ring/attention_weights.hpp>

namespace annulus::ring {
namespace {

// All keys of its batches and heads on every rank, in order of their positions.
NamedSharding whole_keys(const NamedSharding& key) {
  return {key.mesh(),
          PartitionSpec({key.spec()[0], {}, key.spec()[2]}),
          key.global_shape(),
          {key.distribution(0), Distribution::block(), key.distribution(2)}};
}

// A double, as sizes may exceed 64 bits.
double bytes_of(const Extents& shape, DType dtype) {
  auto bytes = static_cast<double>(size_of(dtype));
  for (const std::int64_t size : shape) bytes *= static_cast<double>(size);
  return bytes;
}

std::int64_t first_of(const PositionRanges& positions) {
  return positions.empty() ? 0 : positions.global(LocalPosition(0)).value();
}

}  // namespace

NamedSharding weights_sharding(const AttentionProblem& problem, const ShardedOperands& operands) {
  const NamedSharding& lse = operands.lse;
  const AttentionShape& shape = problem.shape;
  return {lse.mesh(),
          lse.spec(),
          {shape.batch, shape.heads, shape.query_length, shape.kv_length},
          {lse.distribution(0), lse.distribution(1), lse.distribution(2)}};
}

void check_weights_fit(const AttentionProblem& problem, const ShardedOperands& operands) {
  const NamedSharding sharding = weights_sharding(problem, operands);
  const NamedSharding keys = whole_keys(operands.key);
  for (int rank = 0; rank < sharding.mesh().ranks(); ++rank) {
    const double bytes = bytes_of(sharding.local_shape(rank), weights_dtype(problem)) +
                         bytes_of(keys.local_shape(rank), problem.dtype);
    if (bytes <= kMaximumWeightBytes) continue;
    throw UnsupportedError(fmt::format(
        "attention weights {} of rank {} in {}, with the keys {} that it gathers, take more than "
        "{} MiB",
        to_string(sharding.local_shape(rank)), rank, annulus::name_of(weights_dtype(problem)),
        to_string(keys.local_shape(rank)), kMaximumWeightBytes >> 20U));
  }
}

void compute_weights(const AttentionProblem& problem, const ShardedOperands& operands, Mesh& mesh,
                     Device& device, const LocalTensors& tensors, const TensorView& weights,
                     int threads) {
  const int rank = mesh.rank();
  const NamedSharding all_keys = whole_keys(operands.key);
  const std::unique_ptr<Stream> stream = device.make_stream("weights", mesh.watchdog(), nullptr);
  const Tensor keys = collectively(mesh.world(), [&] {
    check_weights_fit(problem, operands);
    if (!device.place().is_host()) {
      throw UnsupportedError("attention weights are computed on CPUs only");
    }
    return Tensor(tensors.key.dtype(), all_keys.local_shape(rank), device.memory());
  });
  reshard(mesh, device, *stream, operands.key, tensors.key, all_keys, keys.view());
  collectively(mesh.world(), [&] {
    const Computing computing = mesh.world().computing();
    AttentionBlock block;
    block.query = tensors.query;
    block.key = keys.view();
    block.rows = operands.query.positions(rank, 1);
    block.columns = all_keys.positions(rank, 1);
    block.first_batch = first_of(operands.query.positions(rank, 0));
    block.first_head = first_of(operands.query.positions(rank, 2));
    block.scores = broadcast_scores(tensors.bias, tensors.mask, weights.shape());
    attention_weights(problem, block, weights, threads);
  });
}

}  // namespace annulus::ring
