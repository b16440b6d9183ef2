#include "schedules/backward/replicas.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace annulus::ring {
namespace {

// Batch, sequence and heads.
constexpr int kSharded = 3;

bool same_part(const NamedSharding& sharding, int a, int b) {
  for (int dim = 0; dim < kSharded; ++dim) {
    if (!(sharding.positions(a, dim) == sharding.positions(b, dim))) return false;
  }
  return true;
}

// True if all ranks along the axes of a dimension hold parts of their own.
bool is_split(const NamedSharding& sharding, int dim) {
  return sharding.distribution(dim).copies(sharding.global_shape()[dim], sharding.shards(dim)) == 1;
}

}  // namespace

Replicas replicas_of(const ShardedOperands& operands, Operand operand, int rank) {
  const bool rows = operand == Operand::rows;
  const NamedSharding& shared = rows ? operands.query : operands.key;
  const NamedSharding& other = rows ? operands.key : operands.query;
  AxisNames own;  // that tell this operand's parts apart
  for (int dim = 0; dim < kSharded; ++dim) {
    if (!is_split(shared, dim)) continue;
    own.insert(own.end(), shared.spec()[dim].begin(), shared.spec()[dim].end());
  }
  Replicas replicas;
  for (int dim = 0; dim < kSharded; ++dim) {
    for (const std::string& axis : other.spec()[dim]) {
      if (other.mesh().axis_size(axis) > 1 && std::ranges::count(own, axis) == 0) {
        replicas.axes.push_back(axis);
      }
    }
  }
  const std::vector<int> group = other.mesh().group(rank, replicas.axes);
  for (std::size_t member = 0; member < group.size(); ++member) {
    if (same_part(shared, group[member], rank)) {
      replicas.members.push_back(static_cast<int>(member));
    }
  }
  return replicas;
}

// All ranks along these axes have rows, batches or heads of their own.
Replicas replicas_of_sinks(const ShardedOperands& operands, bool shared, int rank) {
  Replicas replicas;
  const NamedSharding& query = operands.query;
  for (int dim = 0; dim < kSharded; ++dim) {
    const bool of_heads = dim == 2;
    if (of_heads && !shared) continue;
    for (const std::string& axis : query.spec()[dim]) {
      if (query.mesh().axis_size(axis) > 1) replicas.axes.push_back(axis);
    }
  }
  const std::size_t count = query.mesh().group(rank, replicas.axes).size();
  replicas.members.resize(count);
  std::iota(replicas.members.begin(), replicas.members.end(), 0);
  return replicas;
}

}  // namespace annulus::ring
