#include "launcher/setup/hints.hpp"

#include <algorithm>

#include <fmt/format.h>

#include <annulus/core/division.hpp>
#include <annulus/core/error.hpp>

#include "launcher/report/report.hpp"

namespace annulus::launcher {
namespace {

// True if heads and positions of the files are probably swapped: there are more heads than in any
// model, or more heads than positions on both sides, or fewer queries than heads and as many keys
// as heads. Few queries alone prove nothing: decoding has them.
bool looks_swapped(const AttentionShape& shape) {
  if (shape.heads > kMaximumHeads) return true;
  const bool few_rows = shape.query_length > 1 && shape.query_length < shape.heads;
  return few_rows && (shape.kv_heads > shape.kv_length || shape.heads == shape.kv_length);
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
  if (layout.granule) {
    const std::int64_t ranks = mesh.size(layout.query[1]);
    const std::int64_t granules = ceil_divide(shape.query_length, *layout.granule);
    if (granules < ranks) {
      hints.push_back(fmt::format(
          "--granule {}: {} positions of query have {} for {} ranks of the sequence, so some ranks "
          "have no rows",
          *layout.granule, shape.query_length, counted(granules, "granule"), ranks));
    }
  }
  if (options.causal && options.bias_policy == BiasPolicy::combine && !options.causal_offset &&
      shape.query_length < shape.kv_length) {
    hints.push_back(fmt::format(
        "--causal hides the keys from {} on from all queries, as T = {} is less than S = {}: "
        "if the queries are the last of the sequence, as in decoding, give "
        "--causal-offset bottom-right (--causal-offset 0 if not)",
        shape.query_length, shape.query_length, shape.kv_length));
  }
  if (options.command != Command::run && shape.heads > kMaximumHeads) {
    hints.push_back(fmt::format(
        "--shape: {} heads and {} positions of query look swapped: the order is B,T,S,N,K,D",
        shape.heads, shape.query_length));
  }
  if (options.command == Command::run && looks_swapped(shape)) {
    // If query and key have different orders, --layout does not help.
    const bool both = shape.kv_heads > shape.kv_length || shape.kv_heads > kMaximumHeads;
    const std::string text =
        fmt::format("{} heads and {} positions of query look swapped", shape.heads,
                    shape.query_length) +
        (both ? fmt::format(": files of [B,{}] need --layout {}", options.bhtd ? "T,N,D" : "N,T,D",
                            options.bhtd ? "bthd" : "bhtd")
              : fmt::format(", unlike {} heads and {} positions of key: all files need one order, "
                            "that of --layout",
                            shape.kv_heads, shape.kv_length));
    if (options.given_value("layout") == nullptr) {
      throw UserError(
          fmt::format("--query/--key: {} (--layout bthd takes them as they are)", text));
    }
    hints.push_back(text);
  }
  return hints;
}

std::vector<std::string> hints_of_choice(const Options& options,
                                         const std::vector<ring::Schedule>& chosen,
                                         std::optional<bool> rounds_gradients) {
  std::vector<std::string> hints;
  std::string names;
  for (const ring::Schedule schedule : chosen) {
    const std::string name(ring::name_of(schedule));
    if (names.find(name) == std::string::npos) names += (names.empty() ? "" : " and ") + name;
  }
  const auto add = [&](const char* option, const std::string& value, const std::string& why) {
    hints.push_back(fmt::format("--{} {}: has no effect: {}", option, value, why));
  };
  const auto need = [&](const char* option, int value, ring::Schedule user) {
    if (!options.named.contains(option) || std::ranges::find(chosen, user) != chosen.end()) return;
    add(option, std::to_string(value),
        fmt::format("--schedule auto has chosen {}; only {} uses it", names, ring::name_of(user)));
  };
  if (options.schedule == "auto") {
    need("ulysses-degree", options.ulysses_degree, ring::Schedule::hybrid);
    need("inner-size", options.inner_size, ring::Schedule::double_ring);
  }
  if (rounds_gradients == false && options.named.contains("grad-wire") &&
      options.grad_wire != DType::float32) {
    add("grad-wire", std::string(annulus::name_of(options.grad_wire)),
        fmt::format("here {} sends no partial gradients of keys and values", names));
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
