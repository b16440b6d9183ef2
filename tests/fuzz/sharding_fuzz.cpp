// Three lines: a mesh, a partition spec, and the shape of a problem whose query it shards.

#include <algorithm>
#include <string>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/partition/named_sharding.hpp>

#include "fuzzing.hpp"
#include "launcher/options/option_values.hpp"

using namespace annulus;
using namespace annulus::test;

namespace {

constexpr int kMaximumRanks = 64;  // larger meshes are only parsed

void check_groups(const MeshShape& mesh) {
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    for (const MeshAxis& axis : mesh.axes()) {
      const std::vector<std::string> axes{axis.name};
      const std::vector<int> group = mesh.group(rank, axes);
      require(static_cast<int>(group.size()) == axis.size, "a group is as large as its axis");
      const auto place = static_cast<std::size_t>(mesh.coordinate(rank, axis.name));
      require(group[place] == rank, "a rank stands at its coordinate in its group");
    }
  }
}

void check_tiling(const NamedSharding& sharding) {
  std::int64_t entries = 0;
  for (int rank = 0; rank < sharding.mesh().ranks(); ++rank) {
    if (sharding.is_primary(rank)) entries += sharding.local_shape(rank).product();
  }
  require(entries == sharding.global_shape().product(), "the shards are the whole array");
}

std::optional<MeshShape> check_mesh(std::string_view text) {
  std::optional<MeshShape> mesh;
  for (const int ranks : {48, 8, 1, 0}) {
    const auto parsed = taken([&] { return MeshShape::parse(text, ranks); });
    if (!parsed) continue;
    require(ranks == 0 || parsed->ranks() == ranks, "a mesh has as many ranks as there are");
    require(MeshShape::parse(to_string(*parsed), 0) == *parsed, "a mesh is what its text says");
    mesh = parsed;
  }
  if (mesh && mesh->ranks() <= kMaximumRanks) check_groups(*mesh);
  return mesh;
}

std::optional<PartitionSpec> check_spec(std::string_view text) {
  auto spec = taken([&] { return PartitionSpec::parse(text); });
  if (spec)
    require(PartitionSpec::parse(to_string(*spec)) == *spec, "a spec is what its text says");
  return spec;
}

std::optional<Extents> check_shape(std::string_view text) {
  return taken([&] {
    const AttentionShape shape = launcher::parse_shape("--shape", text);
    shape.validate();
    return Extents{shape.batch, shape.query_length, shape.heads, shape.head_dim};
  });
}

// The next line, which is taken off the text.
std::string_view line(std::string_view& text) {
  const std::string_view first = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(first.size() + 1, text.size()));
  return first;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string_view text = text_of(data, size);
  const auto mesh = check_mesh(line(text));
  const auto spec = check_spec(line(text));
  const auto shape = check_shape(text);
  if (!mesh || !spec || !shape || mesh->ranks() > kMaximumRanks) return 0;
  for (const LayoutKind layout :
       {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
    const std::vector<Distribution> distributions{
        Distribution::block(),
        Distribution::sequence(layout, layout == LayoutKind::striped ? 1 : 3),
        Distribution::kv_heads()};
    const CorrectedSpec corrected = corrected_spec(*spec, *mesh, *shape, distributions);
    check_tiling(NamedSharding(*mesh, corrected.spec, *shape, distributions));
    const bool fits = taken([&] {
                        check_tiling(NamedSharding(*mesh, *spec, *shape, distributions));
                        return true;
                      }).has_value();
    require(fits == corrected.corrections.empty(),
            "a spec is corrected only where it does not fit");
  }
  return 0;
}
