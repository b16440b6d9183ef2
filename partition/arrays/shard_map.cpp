#include <algorithm>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/partition/reshard.hpp>
#include <annulus/partition/shard_map.hpp>
#include <annulus/partition/shard_map_call.hpp>

#include "arrays/add_terms.hpp"
#include "arrays/digest.hpp"

namespace annulus {
namespace {

void check_count(const char* specs, std::size_t given, std::size_t expected, const char* what) {
  if (given != expected) {
    throw ArgumentError(specs, fmt::format("{} specs", given),
                        fmt::format("one for each of {} {}", expected, what));
  }
}

std::vector<NamedSharding> in_shardings(const Mesh& mesh, const ShardMap& map,
                                        const ShardedArguments& arguments) {
  check_count("in_specs", map.in_specs.size(), arguments.size(), "arguments");
  std::vector<NamedSharding> result;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const ShardSpec& spec = map.in_specs[i];
    result.emplace_back(mesh.shape(), spec.spec, arguments[i].get().global_shape(),
                        spec.distributions);
  }
  return result;
}

// The body reads shards and writes results that may end right after it: shards that were moved, and
// all results if any rank fails. Their memory would go to others, so what the body has submitted
// ends first, also if it throws.
std::vector<Tensor> run_and_wait(const ShardBody& body, std::span<const ConstTensorView> shards,
                                 Stream& stream) {
  std::vector<Tensor> results;
  try {
    results = body(shards);
  } catch (...) {
    try {
      stream.synchronize();
    } catch (...) {
      // The body's own error says more.
    }
    throw;
  }
  stream.synchronize();
  return results;
}

std::vector<Tensor> run_body(const ShardMap& map, std::span<const ConstTensorView> shards,
                             Place place, Stream& stream) {
  std::vector<Tensor> results = run_and_wait(map.body, shards, stream);
  check_count("out_specs", map.out_specs.size(), results.size(), "results of the body");
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i].view().place() == place) continue;
    throw ArgumentError(fmt::format("result {}", i),
                        "memory of " + to_string(results[i].view().place()),
                        "memory of " + to_string(place) + ", the device of the call");
  }
  return results;
}

// The description of one result that a rank sends to the others.
struct ResultInfo {
  DType dtype = DType::float32;
  Extents shape;
  std::string digest;
};

std::string encoded(const ResultInfo& info) {
  return fmt::format("{} {} {} {}", name_of(info.dtype), info.shape.rank(),
                     fmt::join(info.shape.begin(), info.shape.end(), " "), info.digest);
}

ResultInfo decoded(const std::string& text) {
  std::istringstream words(text);
  ResultInfo info;
  std::string dtype;
  int rank = 0;
  words >> dtype >> rank;
  std::vector<std::int64_t> shape(static_cast<std::size_t>(rank));
  for (std::int64_t& size : shape) words >> size;
  words >> info.digest;
  info.dtype = parse_dtype(dtype);
  info.shape = Extents(shape);
  return info;
}

// The digest of a tensor in the device's memory, after its stream has written it.
std::string digest_of(const Tensor& tensor, Device& device, Stream& stream) {
  if (device.place().is_host()) {
    stream.synchronize();
    return digest(tensor.view().data(), tensor.bytes());
  }
  const Tensor staged(tensor.dtype(), tensor.shape(), device.staging());
  device.copy(tensor.view(), staged.view(), stream);
  stream.synchronize();
  return digest(staged.view().data(), staged.bytes());
}

// Gathers every rank's description of one result, in order of rank.
std::vector<ResultInfo> gather_info(Control& world, const Tensor& result, std::string digest) {
  const ResultInfo mine{result.dtype(), result.shape(), std::move(digest)};
  std::vector<ResultInfo> all;
  for (const std::string& text : world.gather_text(encoded(mine), "results of a function")) {
    all.push_back(decoded(text));
  }
  return all;
}

void check_dtypes(const std::vector<ResultInfo>& infos, int result) {
  for (std::size_t rank = 1; rank < infos.size(); ++rank) {
    if (infos[rank].dtype == infos[0].dtype) continue;
    throw ArgumentError(fmt::format("result {} of rank {}", result, rank),
                        std::string(name_of(infos[rank].dtype)),
                        fmt::format("{}, as on rank 0", name_of(infos[0].dtype)));
  }
}

// Checks the terms of a summed result, and returns the number of terms of each rank of `group`.
// Every rank has the same information, so all throw alike.
std::vector<std::int64_t> terms_of(const MeshShape& mesh, const ShardSpec& spec, int self,
                                   const std::vector<ResultInfo>& infos, int result) {
  const std::string argument = fmt::format("result {}", result);
  for (const std::string& axis : spec.summed) {
    if (!spec.spec.names(axis)) continue;
    throw ArgumentError(argument, fmt::format("summed along axis '{}'", axis),
                        "an axis that its out_spec does not name");
  }
  if (!is_floating(infos[0].dtype)) {
    throw ArgumentError(argument, std::string(name_of(infos[0].dtype)),
                        "a floating-point dtype, because it is summed");
  }
  const auto shape_of = [&](int rank) -> const Extents& {
    return infos[static_cast<std::size_t>(rank)].shape;
  };
  const int first_dim = spec.stacked ? 1 : 0;
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    const int first = mesh.group(rank, spec.summed).front();
    const Extents& shape = shape_of(rank);
    bool same = shape.rank() == shape_of(first).rank() && shape.rank() >= first_dim;
    for (int dim = first_dim; same && dim < shape.rank(); ++dim) {
      same = shape[dim] == shape_of(first)[dim];
    }
    if (same) continue;
    throw ArgumentError(
        argument, fmt::format("shape {} on rank {}", to_string(shape), rank),
        fmt::format("{} like {} on rank {}, because it is summed",
                    spec.stacked ? "terms" : "a term", to_string(shape_of(first)), first));
  }
  std::vector<std::int64_t> terms;
  for (const int rank : mesh.group(self, spec.summed)) {
    terms.push_back(spec.stacked ? shape_of(rank)[0] : 1);
  }
  return terms;
}

// The sum of all terms, which replaces this rank's terms.
Tensor sum_of(Mesh& mesh, Device& device, Stream& stream, const ShardSpec& spec,
              const std::vector<std::int64_t>& terms, const Tensor& mine) {
  Group& group = mesh.group(spec.summed);
  const Extents& shape = mine.shape();
  const Extents one(std::vector<std::int64_t>(shape.begin() + (spec.stacked ? 1 : 0), shape.end()));
  HostMemoryPool host;
  auto [staged, sum, result] = collectively(mesh.world(), [&] {
    return std::tuple(Tensor(mine.dtype(), shape, host), Tensor(mine.dtype(), one, host),
                      Tensor(mine.dtype(), one, device.memory()));
  });
  device.copy(mine.view(), staged.view(), stream);
  stream.synchronize();
  add_terms(group, mesh.watchdog(), terms, staged.view(), sum.view());
  device.copy(sum.view(), result.view(), stream);
  stream.synchronize();
  return std::move(result);
}

void check_equal_along(const MeshShape& mesh, const std::string& axis,
                       const std::vector<ResultInfo>& infos, int result) {
  std::set<int> same;  // ranks that others were compared with …
  std::set<int> different;
  const std::vector<std::string> axes{axis};
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    const int first = mesh.group(rank, axes).front();
    const auto digest_of = [&](int r) { return infos[static_cast<std::size_t>(r)].digest; };
    if (digest_of(rank) == digest_of(first)) continue;
    same.insert(first);
    different.insert(rank);
  }
  if (different.empty()) return;
  throw UserError(fmt::format(
      "result {}: values differ along axis '{}', which its out_spec does not name, so they must be "
      "equal: {} {} against {} {}",
      result, axis, different.size() == 1 ? "rank" : "ranks", fmt::join(different, ", "),
      same.size() == 1 ? "rank" : "ranks", fmt::join(same, ", ")));
}

}  // namespace

NamedSharding result_sharding(const MeshShape& mesh, const ShardSpec& spec,
                              std::span<const Extents> local_shapes, int result) {
  const std::string argument = fmt::format("result {}", result);
  for (const Distribution& distribution : spec.distributions) {
    if (distribution.kind() == Distribution::Kind::kv_heads) {
      throw ArgumentError(argument, "kv_heads in its out_spec", "blocks or sequences");
    }
  }
  for (std::size_t rank = 1; rank < local_shapes.size(); ++rank) {
    if (local_shapes[rank].rank() != local_shapes[0].rank()) {
      throw ArgumentError(
          argument, fmt::format("shape {} on rank {}", to_string(local_shapes[rank]), rank),
          fmt::format("as many dimensions as {} on rank 0", to_string(local_shapes[0])));
    }
  }
  Extents global = local_shapes[0];
  for (int dim = 0; dim < std::min(global.rank(), spec.spec.entries()); ++dim) {
    global[dim] = 0;
    for (const int rank : mesh.group(0, spec.spec[dim])) {
      global[dim] += local_shapes[static_cast<std::size_t>(rank)][dim];
    }
  }
  NamedSharding sharding(mesh, spec.spec, global, spec.distributions);
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    const Extents& shape = local_shapes[static_cast<std::size_t>(rank)];
    if (!(shape == sharding.local_shape(rank))) {
      throw ArgumentError(argument, fmt::format("shape {} on rank {}", to_string(shape), rank),
                          fmt::format("{}, its part of {}", to_string(sharding.local_shape(rank)),
                                      to_string(sharding)));
    }
  }
  return sharding;
}

std::vector<ShardedTensor> shard_map(Mesh& mesh, Device& device, Stream& stream,
                                     const ShardMap& map, const ShardedArguments& arguments) {
  Control& world = mesh.world();
  const std::vector<NamedSharding> wanted =
      collectively(world, [&] { return in_shardings(mesh, map, arguments); });

  std::vector<Tensor> moved;  // shards of arguments that had to be resharded
  moved.reserve(arguments.size());
  std::vector<ConstTensorView> shards;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const ShardedTensor& argument = arguments[i];
    if (same_placement(argument.sharding(), wanted[i])) {
      shards.push_back(argument.local());
      continue;
    }
    Tensor& shard =
        moved.emplace_back(argument.dtype(), wanted[i].local_shape(mesh.rank()), device.memory());
    reshard(mesh, device, stream, argument.sharding(), argument.local(), wanted[i], shard.view());
    shards.emplace_back(shard.view());
  }

  std::vector<Tensor> results =
      collectively(world, [&] { return run_body(map, shards, device.place(), stream); });

  // From here on every rank has the same information and decides alike.
  std::vector<ShardedTensor> labelled;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const int number = static_cast<int>(i);
    const ShardSpec& spec = map.out_specs[i];
    if (!spec.summed.empty()) {
      const std::vector<ResultInfo> terms = gather_info(world, results[i], "-");
      check_dtypes(terms, number);
      results[i] = sum_of(mesh, device, stream, spec,
                          terms_of(mesh.shape(), spec, mesh.rank(), terms, number), results[i]);
    }
    std::string values = "-";
    if (map.check_replication) {
      values = collectively(world, [&] { return digest_of(results[i], device, stream); });
    }
    const std::vector<ResultInfo> infos = gather_info(world, results[i], std::move(values));
    check_dtypes(infos, number);
    std::vector<Extents> shapes;
    for (const ResultInfo& info : infos) shapes.push_back(info.shape);
    NamedSharding sharding = result_sharding(mesh.shape(), spec, shapes, number);
    if (map.check_replication) {
      for (const MeshAxis& axis : mesh.shape().axes()) {
        if (!spec.spec.names(axis.name)) check_equal_along(mesh.shape(), axis.name, infos, number);
      }
    }
    labelled.emplace_back(std::move(sharding), mesh.rank(), std::move(results[i]));
  }
  return labelled;
}

ShardMap transpose(const ShardMap& map, ShardBody gradients, bool stacked) {
  ShardMap result{std::move(gradients), map.in_specs, map.in_specs, map.check_replication};
  result.in_specs.insert(result.in_specs.end(), map.out_specs.begin(), map.out_specs.end());
  AxisNames named;
  for (const ShardSpec& one : result.in_specs) {
    for (int dim = 0; dim < one.spec.entries(); ++dim) {
      for (const std::string& axis : one.spec[dim]) {
        if (std::ranges::count(named, axis) == 0) named.push_back(axis);
      }
    }
  }
  for (ShardSpec& one : result.out_specs) {
    std::ranges::copy_if(named, std::back_inserter(one.summed),
                         [&](const std::string& axis) { return !one.spec.names(axis); });
    one.stacked = stacked && !one.summed.empty();
  }
  return result;
}

}  // namespace annulus
