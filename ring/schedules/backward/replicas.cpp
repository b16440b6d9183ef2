#include "schedules/backward/replicas.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <utility>

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

void append_axes(AxisNames& axes, const NamedSharding& sharding, int dim) {
  for (const std::string& axis : sharding.spec()[dim]) {
    if (sharding.mesh().axis_size(axis) > 1) axes.push_back(axis);
  }
}

// All ranks along these axes.
Replicas all_along(AxisNames axes, const MeshShape& mesh, int rank) {
  Replicas replicas{std::move(axes), {}};
  replicas.members.resize(mesh.group(rank, replicas.axes).size());
  std::iota(replicas.members.begin(), replicas.members.end(), 0);
  return replicas;
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
  AxisNames own;  // axes that tell this operand's parts apart
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

// All ranks along the axes of batches and rows contribute, and along the axes of heads if heads
// share their sinks.
Replicas replicas_of_sinks(const ShardedOperands& operands, bool shared, int rank) {
  const NamedSharding& query = operands.query;
  AxisNames axes;
  for (int dim = 0; dim < kSharded; ++dim) {
    const bool of_heads = dim == 2;
    if (!of_heads || shared) append_axes(axes, query, dim);
  }
  return all_along(std::move(axes), query.mesh(), rank);
}

Replicas replicas_of_bias(const ShardedOperands& operands, int rank) {
  const NamedSharding& query = operands.query;
  const Extents& bias = operands.bias.value().global_shape();
  AxisNames axes = replicas_of(operands, Operand::rows, rank).axes;
  for (const auto& [dim, of_query] : {std::pair(0, 0), std::pair(1, 2), std::pair(2, 1)}) {
    if (bias[dim] == 1) append_axes(axes, query, of_query);
  }
  return all_along(std::move(axes), query.mesh(), rank);
}

}  // namespace annulus::ring
