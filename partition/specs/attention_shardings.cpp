
#include <annulus/partition/sharding_rules.hpp>

namespace annulus {
namespace {

// Stands for any shape that is not broadcast.
const Extents kFull{2, 2, 2, 2};

// The spec of the same tensor in BHTD order.
PartitionSpec heads_first(const PartitionSpec& spec) {
  return PartitionSpec({spec[0], spec[2], spec[1], spec[3]});
}

}  // namespace

AttentionShardings get_shardings(const ShardingRules& rules, const MeshShape& mesh,
                                 AttentionMode mode, const AttentionShardingOptions& options) {
  const ShardingRules known = rules.for_mesh(mesh);
  AttentionShardings result;
  result.query = known.query_spec(mode);
  result.key = known.kv_spec(mode);
  if (options.bhtd) {
    result.query = heads_first(result.query);
    result.key = heads_first(result.key);
  }
  result.value = result.key;
  result.output = result.query;
  result.lse = known.lse_spec(mode);
  result.weights = known.bias_spec(mode, kFull);
  result.bias = known.bias_spec(mode, options.bias.value_or(kFull));
  result.mask = known.bias_spec(mode, options.mask.value_or(kFull));
  result.query_segments = known.query_segments_spec(mode);
  result.kv_segments = known.kv_segments_spec(mode);
  result.lengths = known.lengths_spec(mode);
  result.sinks = known.sinks_spec(mode, options.sinks_rank);
  return result;
}

}  // namespace annulus
