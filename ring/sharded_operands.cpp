#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/balance.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {
namespace {

// Checks each spec alone before the two are compared.
void check_axes(const PartitionSpec& spec, const MeshShape& mesh) {
  static_cast<void>(mesh.size(spec.axes()));  // UnknownAxisError
}

void check_same_axes(const OperandLayout& layout, int dim, const char* what) {
  if (layout.query[dim] == layout.kv[dim]) return;
  throw ArgumentError(
      std::string("query and key/value specs, ") + what,
      fmt::format("{} and {}", to_string(layout.query[dim]), to_string(layout.kv[dim])),
      "the same axes in both");
}

void check_whole(const PartitionSpec& spec, const char* name) {
  if (spec[3].empty()) return;
  throw ArgumentError(std::string(name) + " spec, head dimension", to_string(spec[3]),
                      "none: a head dimension cannot be sharded");
}

// True if keys can have the layout of the rows.
bool alike(const AttentionShape& shape, const PartitionSpec& query, const PartitionSpec& kv) {
  return shape.query_length == shape.kv_length && query[1] == kv[1];
}

/// How rows and columns are distributed.
struct Sequences {
  Distribution rows;
  Distribution columns;
};

LayoutKind kv_kind(const OperandLayout& layout) {
  return layout.kv_sequence.value_or(layout.sequence);
}

Sequences sequences_of(const AttentionProblem& problem, const MeshShape& mesh,
                       const OperandLayout& layout) {
  const int batch = mesh.size(layout.query[0]);
  if (problem.shape.batch % batch != 0) return {};  // refused later, by the query's sharding
  const bool same =
      layout.sequence == kv_kind(layout) &&
      (layout.sequence != LayoutKind::balanced || alike(problem.shape, layout.query, layout.kv));
  const auto distribution = [&](LayoutKind kind, const AxisNames& axes, const auto& assign) {
    return kind == LayoutKind::balanced
               ? Distribution::assigned(assign(problem, {mesh.size(axes), batch}, layout.granule))
               : Distribution::sequence(kind, layout.granule.value_or(1));
  };
  const Distribution rows = distribution(layout.sequence, layout.query[1], assign_rows);
  if (same) return {rows, rows};
  return {rows, distribution(kv_kind(layout), layout.kv[1], assign_columns)};
}

// False for axes that the mesh lacks; the shardings refuse them later.
bool has_axes(const MeshShape& mesh, const AxisNames& axes) {
  return std::all_of(axes.begin(), axes.end(),
                     [&](const std::string& axis) { return mesh.has_axis(axis); });
}

bool has_shards(const MeshShape& mesh, const AxisNames& axes) {
  return has_axes(mesh, axes) && mesh.size(axes) > 1;
}

// True if balanced rows are clearly better than the given layout.
bool wants_balance(const AttentionProblem& problem, const MeshShape& mesh,
                   const OperandLayout& layout) {
  constexpr std::int64_t kFewestRows = 256;  // per rank: with fewer, other costs dominate
  constexpr double kUneven = 0.1;
  const AttentionShape& shape = problem.shape;
  const AxisNames& axes = layout.query[1];
  if (!alike(shape, layout.query, layout.kv) || !has_axes(mesh, layout.query[0]) ||
      !has_axes(mesh, axes)) {
    return false;
  }
  const int ranks = mesh.size(axes);
  const int batch = mesh.size(layout.query[0]);
  if (ranks == 1 || shape.query_length < kFewestRows * ranks || shape.batch % batch != 0) {
    return false;
  }
  const auto imbalance = [&](const Distribution& rows) {
    return tile_imbalance(
        problem, NamedSharding(mesh, PartitionSpec({layout.query[0], axes}),
                               {shape.batch, shape.query_length}, {Distribution::block(), rows}));
  };
  const std::optional<double> uneven = imbalance(Distribution::sequence(layout.sequence));
  if (!uneven || *uneven < kUneven) return false;
  const Assignment assignment = assign_rows(problem, {ranks, batch}, layout.granule);
  return imbalance(Distribution::assigned(assignment)) <= *uneven / 2;
}

}  // namespace

OperandLayout default_layout(const AttentionProblem& problem, const MeshShape& mesh,
                             const LayoutOptions& options) {
  const AttentionMode mode =
      options.mode.value_or(infer_attention_mode(problem.shape.query_length));
  const ShardingRules rules = options.rules.for_mesh(mesh);
  OperandLayout layout{options.query_spec ? *options.query_spec : rules.query_spec(mode),
                       options.kv_spec ? *options.kv_spec : rules.kv_spec(mode)};
  layout.granule = options.granule;
  layout.kv_sequence = options.kv_layout;
  if (options.layout) {
    layout.sequence = *options.layout;
    return layout;
  }
  const bool sharded = has_shards(mesh, layout.query[1]) || has_shards(mesh, layout.kv[1]);
  layout.sequence = sharded && problem.mask.causal() ? LayoutKind::zigzag : LayoutKind::contiguous;
  if (wants_balance(problem, mesh, layout)) layout.sequence = LayoutKind::balanced;
  return layout;
}

PartitionSpec scores_spec(const Extents& scores, const PartitionSpec& query) {
  const auto axes = [&](int dim, int of_query) {
    return scores[dim] == 1 ? AxisNames() : query[of_query];
  };
  return PartitionSpec({axes(0, 0), axes(1, 2), axes(2, 1), AxisNames()});
}

std::string layout_text(const OperandLayout& layout) {
  std::string text(annulus::name_of(layout.sequence));
  if (kv_kind(layout) != layout.sequence) {
    text += "," + std::string(annulus::name_of(kv_kind(layout)));
  }
  if (layout.granule) text += ":" + std::to_string(*layout.granule);
  return text;
}

ShardedOperands shard_operands(const AttentionProblem& problem, const MeshShape& mesh,
                               const OperandLayout& layout) {
  const AttentionShape& shape = problem.shape;
  check_axes(layout.query, mesh);
  check_axes(layout.kv, mesh);
  check_same_axes(layout, 0, "batch");
  check_same_axes(layout, 2, "heads");
  check_whole(layout.query, "query");
  check_whole(layout.kv, "key/value");
  const Sequences sequences = sequences_of(problem, mesh, layout);
  const std::vector<Distribution> rows{Distribution::block(), sequences.rows};
  const std::vector<Distribution> columns{Distribution::block(), sequences.columns,
                                          Distribution::kv_heads()};
  const auto scores = [&](const std::optional<Extents>& size) -> std::optional<NamedSharding> {
    if (!size) return {};
    std::vector<Distribution> distributions{Distribution::block(), Distribution::block()};
    if ((*size)[2] != 1) distributions.push_back(sequences.rows);
    return NamedSharding(mesh, scores_spec(*size, layout.query), *size, distributions);
  };
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
                        {Distribution::block(), Distribution::block(), sequences.rows}),
          scores(problem.bias),
          scores(problem.dense_mask)};
}

}  // namespace annulus::ring
