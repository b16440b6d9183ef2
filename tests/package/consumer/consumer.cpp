// The library as a program of your own uses it: causal attention over a sequence that the ranks
// share. Each rank makes its own shards; row i of the query is all zeros, so output row i is the
// mean of the values 0 … i, that is i / 2, which is checked.
//
//     mpirun -np 4 ./consumer
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include <annulus/core/device.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/sharded_attention.hpp>

int main(int argc, char** argv) {
  using namespace annulus;
  const MpiSession session(&argc, &argv);  // one rank needs no mpirun
  Mesh mesh(MeshShape::parse("sp=-1", session.size()), session.world(),
            Watchdog(std::chrono::seconds(300)));

  AttentionProblem problem;
  problem.shape = {.batch = 1,
                   .query_length = 1000,
                   .kv_length = 1000,
                   .heads = 8,
                   .kv_heads = 2,
                   .head_dim = 64,
                   .value_dim = 64};
  problem.mask.set_causal(true);
  const PartitionSpec spec = PartitionSpec::parse("-,sp,-,-");  // [batch, sequence, heads, dim]
  const ring::ShardedOperands operands =
      ring::shard_operands(problem, mesh.shape(), {spec, spec, LayoutKind::zigzag, 1});

  // The shards of this rank, and which rows of the whole sequence they hold.
  HostDevice device;
  const auto shard = [&](const NamedSharding& sharding) {
    return Tensor(DType::float32, sharding.local_shape(mesh.rank()), device.memory());
  };
  Tensor query = shard(operands.query);
  Tensor key = shard(operands.key);
  Tensor value = shard(operands.value);
  const Tensor output = shard(operands.output);
  const Tensor lse = shard(operands.lse);
  const PositionRanges rows = operands.key.positions(mesh.rank(), 1);
  query.fill_zero();
  key.fill_zero();
  for (std::int64_t i = 0; i < rows.size(); ++i) {
    for (std::int64_t n = 0; n < 2; ++n) {
      for (std::int64_t d = 0; d < 64; ++d) {
        value.view().at<float>({0, i, n, d}) =
            static_cast<float>(rows.global(LocalPosition(i)).value());
      }
    }
  }

  const Registry registry = Registry::standard();
  ring::ShardedAttention attention(problem, operands, mesh, registry, device, {});
  attention.run({query.view(), key.view(), value.view(), output.view(), lse.view()});

  double worst = 0;
  for (std::int64_t i = 0; i < rows.size(); ++i) {
    const auto position = static_cast<double>(rows.global(LocalPosition(i)).value());
    for (std::int64_t n = 0; n < 8; ++n) {
      worst = std::fmax(worst, std::abs(output.view().at<float>({0, i, n, 63}) - position / 2));
      worst = std::fmax(worst, std::abs(lse.view().at<float>({0, n, i}) - std::log(position + 1)));
    }
  }
  worst = mesh.world().max({&worst, 1})[0];
  if (mesh.rank() == 0) std::printf("%d ranks, largest error %.1e\n", mesh.size(), worst);
  return worst < 1e-3 ? 0 : 1;
}
