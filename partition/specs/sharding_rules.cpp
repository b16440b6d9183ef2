#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/sharding_rules.hpp>

namespace annulus {
namespace {

constexpr std::size_t index_of(SemanticAxis axis) {
  return static_cast<std::size_t>(axis);
}

constexpr std::array<std::string_view, kSemanticAxes.size()> kNames{
    "batch", "query_length", "kv_length", "head", "kv_head", "head_dim"};

}  // namespace

std::string_view name_of(SemanticAxis axis) noexcept {
  return kNames[index_of(axis)];
}

SemanticAxis parse_semantic_axis(std::string_view name) {
  std::string known;
  for (const SemanticAxis axis : kSemanticAxes) {
    if (name_of(axis) == name) return axis;
    known += (known.empty() ? "" : ", ") + std::string(name_of(axis));
  }
  throw ArgumentError("semantic axis", fmt::format("'{}'", name), "one of " + known);
}

ShardingRules::ShardingRules() {
  defaults_[index_of(SemanticAxis::batch)] = {"fsdp", "dp"};
  defaults_[index_of(SemanticAxis::query_length)] = {"sp"};
  defaults_[index_of(SemanticAxis::kv_length)] = {"sp"};
  defaults_[index_of(SemanticAxis::head)] = {"tp"};
  defaults_[index_of(SemanticAxis::kv_head)] = {"tp"};
}

void ShardingRules::set(ShardingRule rule) {
  const auto key = [](const ShardingRule& known) { return std::tie(known.axis, known.mode); };
  const auto place = std::find_if(rules_.begin(), rules_.end(), [&](const ShardingRule& known) {
    return key(known) >= key(rule);
  });
  if (place != rules_.end() && key(*place) == key(rule)) {
    *place = std::move(rule);
  } else {
    rules_.insert(place, std::move(rule));
  }
}

const AxisNames& ShardingRules::axes(SemanticAxis axis, AttentionMode mode) const noexcept {
  const AxisNames* best = &defaults_[index_of(axis)];
  for (const ShardingRule& rule : rules_) {
    if (rule.axis != axis) continue;
    if (rule.mode == mode) return rule.axes;
    if (!rule.mode) best = &rule.axes;
  }
  return *best;
}

ShardingRules ShardingRules::for_mesh(const MeshShape& mesh) const {
  for (const ShardingRule& rule : rules_) {
    for (const std::string& axis : rule.axes) {
      if (!mesh.has_axis(axis)) throw UnknownAxisError(axis, mesh);
    }
  }
  ShardingRules result = *this;
  for (AxisNames& axes : result.defaults_) {
    std::erase_if(axes, [&](const std::string& axis) { return !mesh.has_axis(axis); });
  }
  return result;
}

PartitionSpec ShardingRules::query_spec(AttentionMode mode) const {
  return PartitionSpec({axes(SemanticAxis::batch, mode), axes(SemanticAxis::query_length, mode),
                        axes(SemanticAxis::head, mode), axes(SemanticAxis::head_dim, mode)});
}

PartitionSpec ShardingRules::kv_spec(AttentionMode mode) const {
  return PartitionSpec({axes(SemanticAxis::batch, mode), axes(SemanticAxis::kv_length, mode),
                        axes(SemanticAxis::kv_head, mode), axes(SemanticAxis::head_dim, mode)});
}

PartitionSpec ShardingRules::lse_spec(AttentionMode mode) const {
  return PartitionSpec({axes(SemanticAxis::batch, mode), axes(SemanticAxis::head, mode),
                        axes(SemanticAxis::query_length, mode)});
}

PartitionSpec ShardingRules::bias_spec(AttentionMode mode, const Extents& shape) const {
  const int missing = 4 - shape.rank();  // leading dimensions that broadcasting supplies
  if (missing < 0) {
    throw ArgumentError("bias or mask", "shape " + to_string(shape),
                        "at most 4 dimensions, [B,N,T,S]");
  }
  std::vector<AxisNames> entries{axes(SemanticAxis::batch, mode), axes(SemanticAxis::head, mode),
                                 axes(SemanticAxis::query_length, mode), AxisNames()};
  entries.erase(entries.begin(), entries.begin() + missing);
  for (int dim = 0; dim < shape.rank(); ++dim) {
    if (shape[dim] == 1) entries[static_cast<std::size_t>(dim)].clear();
  }
  return PartitionSpec(std::move(entries));
}

PartitionSpec ShardingRules::query_segments_spec(AttentionMode mode) const {
  return PartitionSpec({axes(SemanticAxis::batch, mode), axes(SemanticAxis::query_length, mode)});
}

PartitionSpec ShardingRules::kv_segments_spec(AttentionMode mode) const {
  return PartitionSpec({axes(SemanticAxis::batch, mode), axes(SemanticAxis::kv_length, mode)});
}

PartitionSpec ShardingRules::lengths_spec(AttentionMode mode) const {
  return PartitionSpec(std::vector<AxisNames>{axes(SemanticAxis::batch, mode)});
}

PartitionSpec ShardingRules::sinks_spec(AttentionMode mode, int rank) const {
  if (rank != 1 && rank != 2) {
    throw ArgumentError("sinks", fmt::format("rank {}", rank), "shape [N,M] or [M]");
  }
  if (rank == 1) return {};
  return PartitionSpec({axes(SemanticAxis::head, mode), AxisNames()});
}

std::optional<PartitionSpec> create_stable_sharding(
    const PartitionSpec& spec, const MeshShape* mesh, bool has_dependency,
    const std::optional<std::vector<int>>& preserved) {
  if (mesh == nullptr) return spec;
  if (!has_dependency) return std::nullopt;
  if (!preserved) return spec;
  std::vector<AxisNames> entries(static_cast<std::size_t>(spec.entries()));
  for (const int dim : *preserved) {
    if (dim < 0) throw ArgumentError("preserved dimension", std::to_string(dim), "0 or more");
    if (dim < spec.entries()) entries[static_cast<std::size_t>(dim)] = spec[dim];
  }
  return PartitionSpec(std::move(entries));
}

}  // namespace annulus
