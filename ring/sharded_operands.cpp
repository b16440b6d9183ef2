#include <vector>

#include <annulus/core/error.hpp>
#include <annulus/partition/sharding_rules.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {
namespace {

void check_same_axes(const OperandLayout& layout, int dim, const char* what) {
  if (layout.query[dim] == layout.kv[dim]) return;
  throw ArgumentError(std::string("key/value spec, ") + what, to_string(layout.kv[dim]),
                      "the axes of the query's, " + to_string(layout.query[dim]));
}

void check_whole(const PartitionSpec& spec, const char* name) {
  if (spec[3].empty()) return;
  throw ArgumentError(std::string(name) + " spec, head dimension", to_string(spec[3]),
                      "none: a head dimension cannot be sharded");
}

}  // namespace

OperandLayout usual_layout(const AttentionProblem& problem, const MeshShape& mesh,
                           AttentionMode mode) {
  const ShardingRules rules = ShardingRules().for_mesh(mesh);
  return {rules.query_spec(mode), rules.kv_spec(mode),
          problem.mask.causal() ? LayoutKind::zigzag : LayoutKind::contiguous};
}

OperandLayout usual_layout(const AttentionProblem& problem, const MeshShape& mesh) {
  return usual_layout(problem, mesh, infer_attention_mode(problem.shape.query_length));
}

ShardedOperands shard_operands(const AttentionProblem& problem, const MeshShape& mesh,
                               const OperandLayout& layout) {
  const AttentionShape& shape = problem.shape;
  check_same_axes(layout, 0, "batch");
  check_same_axes(layout, 2, "heads");
  check_whole(layout.query, "query");
  check_whole(layout.kv, "key/value");
  const Distribution sequence = Distribution::sequence(layout.sequence, layout.granule);
  const std::vector<Distribution> rows{Distribution::block(), sequence};
  const std::vector<Distribution> columns{Distribution::block(), sequence,
                                          Distribution::kv_heads()};
  const PartitionSpec lse({layout.query[0], layout.query[2], layout.query[1]});
  return {NamedSharding(mesh, layout.query,
                        {shape.batch, shape.query_length, shape.heads, shape.head_dim}, rows),
          NamedSharding(mesh, layout.kv,
                        {shape.batch, shape.kv_length, shape.kv_heads, shape.head_dim}, columns),
          NamedSharding(mesh, layout.kv,
                        {shape.batch, shape.kv_length, shape.kv_heads, shape.value_dim}, columns),
          NamedSharding(mesh, layout.query,
                        {shape.batch, shape.query_length, shape.heads, shape.value_dim}, rows),
          NamedSharding(mesh, lse, {shape.batch, shape.heads, shape.query_length},
                        {Distribution::block(), Distribution::block(), sequence})};
}

}  // namespace annulus::ring
