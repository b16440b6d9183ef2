#include "launcher/setup/hints.hpp"

#include <cstdint>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus::launcher {
namespace {

// Models have up to this many heads. More heads than positions, on both sides, are hardly ever
// meant.
constexpr std::int64_t kManyHeads = 64;

bool looks_swapped(const AttentionShape& shape) {
  return shape.heads >= kManyHeads && shape.query_length > 1 && shape.heads > shape.query_length &&
         shape.kv_heads > shape.kv_length;
}

}  // namespace

std::vector<std::string> hints(const Options& options, const AttentionShape& shape,
                               const MeshShape& mesh, const ring::OperandLayout& layout) {
  std::vector<std::string> hints;
  for (const MeshAxis& axis : mesh.axes()) {
    if (axis.size == 1 || layout.query.names(axis.name) || layout.kv.names(axis.name)) continue;
    hints.push_back(
        fmt::format("mesh axis {0} shards nothing: its {1} ranks do the same work (leave it out of "
                    "--mesh, or shard the sequence along it: --query-spec=-,{0} --kv-spec=-,{0})",
                    axis.name, axis.size));
  }
  if (options.causal && options.bias_policy == BiasPolicy::combine && !options.causal_offset &&
      shape.query_length < shape.kv_length) {
    hints.push_back(fmt::format(
        "--causal hides the keys from {} on from all queries, as T = {} is less than S = {}: "
        "if the queries are the last of the sequence, as in decoding, give "
        "--causal-offset bottom-right (--causal-offset 0 if not)",
        shape.query_length, shape.query_length, shape.kv_length));
  }
  if (options.command == Command::run && looks_swapped(shape)) {
    hints.push_back(fmt::format(
        "{} heads and {} positions of query look swapped: files of [B,{}] need --layout {}",
        shape.heads, shape.query_length, options.bhtd ? "T,N,D" : "N,T,D",
        options.bhtd ? "bthd" : "bhtd"));
  }
  return hints;
}

std::string hint_of_ranks(const Options& options, int ranks) {
  try {
    const int wanted = MeshShape::parse(options.mesh.value_or(""), 0).ranks();
    if (ranks == 0 || wanted == ranks) return {};
    return fmt::format("; mpirun -n {} annulus {} ... has as many as this mesh", wanted,
                       name_of(options.command));
  } catch (const UserError&) {
    return {};  // the mesh has another error
  }
}

}  // namespace annulus::launcher
