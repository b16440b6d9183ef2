#include "launcher/setup/result_files.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <annulus/attention/attention_weights.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/partition/reshard.hpp>
#include <annulus/ring/attention_weights.hpp>

#include "launcher/options/file_names.hpp"
#include "launcher/setup/input_tensors.hpp"

namespace annulus::launcher {
namespace {

std::string option_of(std::string name) {
  std::ranges::replace(name, '_', '-');
  return "--" + name;
}

// True if rows of a striped sequence, each of which needs its own write, are less than a page.
bool is_scattered(const Result& result) {
  constexpr std::int64_t kPage = 4096;
  const NamedSharding& sharding = result.sharding;
  if (result.rows < 0) return false;
  const Distribution& distribution = sharding.distribution(result.rows);
  if (distribution.kind() != Distribution::Kind::sequence ||
      distribution.layout() != LayoutKind::striped || sharding.shards(result.rows) == 1) {
    return false;
  }
  const Extents shape = file_order(sharding.local_shape(0), result.bhtd);
  auto row = static_cast<std::int64_t>(size_of(result.dtype));
  for (int dim = result.bhtd ? 3 : result.rows + 1; dim < shape.rank(); ++dim) row *= shape[dim];
  return row < kPage;
}

// The same sharding, but with neighbouring rows on each rank.
NamedSharding without_stripes(const NamedSharding& sharding, int rows) {
  std::vector<Distribution> distributions;
  for (int dim = 0; dim < sharding.dimensions(); ++dim) {
    distributions.push_back(dim == rows ? Distribution::sequence() : sharding.distribution(dim));
  }
  return {sharding.mesh(), sharding.spec(), sharding.global_shape(), std::move(distributions)};
}

}  // namespace

std::vector<Result> forward_results(const Options& options, const AttentionProblem& problem,
                                    const ring::ShardedOperands& operands) {
  const auto of_rows = [&](const char* name, const std::string& path) {
    return Result{name, path, DType::float32, operands.lse, false, 2};
  };
  std::vector<Result> results{
      {"output", options.output, problem.dtype, operands.output, options.bhtd, 1},
      of_rows("lse", options.lse),
      of_rows("maximum", options.maximum),
      of_rows("sum", options.sum)};
  if (problem.weights) {
    results.push_back({"weights", options.weights, weights_dtype(problem),
                       ring::weights_sharding(problem, operands), false, 2});
  }
  std::erase_if(results, [](const Result& result) { return result.path.empty(); });
  return results;
}

ResultFiles::ResultFiles(std::vector<Result> results, Mesh& mesh)
    : mesh_(mesh), results_(std::move(results)) {
  std::vector<std::pair<const Result*, std::vector<files::ArraySpec>>> files;
  for (const Result& result : results_) {
    auto file = std::ranges::find_if(
        files, [&](const auto& one) { return are_one_safetensors(one.first->path, result.path); });
    if (file == files.end()) file = files.insert(file, {&result, {}});
    places_.push_back({static_cast<std::size_t>(file - files.begin()), file->second.size()});
    file->second.push_back(
        {result.name, result.dtype, file_order(result.sharding.global_shape(), result.bhtd)});
  }
  for (auto& [first, arrays] : files) {
    writers_.push_back(std::make_unique<files::ArrayWriter>(
        mesh.world(), first->path, std::move(arrays), option_of(first->name) + " " + first->path));
  }
}

void ResultFiles::write(std::string_view name, const TensorView& shard) {
  const auto found = std::ranges::find(results_, name, &Result::name);
  const Result& result = *found;
  const int rank = mesh_.rank();
  NamedSharding sharding = result.sharding;
  TensorView part = shard;
  Tensor neighbours;
  if (is_scattered(result)) {
    const NamedSharding whole = without_stripes(sharding, result.rows);
    neighbours = collectively(mesh_.world(), [&] {
      return Tensor(shard.dtype(), whole.local_shape(rank), host_.memory());
    });
    const std::unique_ptr<Stream> stream = host_.make_stream("files", mesh_.watchdog(), nullptr);
    reshard(mesh_, host_, *stream, sharding, shard, whole, neighbours.view());
    sharding = whole;
    part = neighbours.view();
  }
  if (!sharding.is_primary(rank)) return;
  const Place& place = places_[static_cast<std::size_t>(found - results_.begin())];
  writers_[place.file]->write_slice(file_order(sharding.index(rank), result.bhtd),
                                    file_order(part, result.bhtd), place.array);
}

void ResultFiles::write(const ring::LocalTensors& tensors) {
  using Tensors = ring::LocalTensors;
  for (const auto& [name, tensor] :
       {std::pair("output", &Tensors::output), std::pair("lse", &Tensors::lse),
        std::pair("maximum", &Tensors::maximum), std::pair("sum", &Tensors::sum),
        std::pair("weights", &Tensors::weights)}) {
    if (std::ranges::find(results_, name, &Result::name) == results_.end()) continue;
    write(name, tensors.*tensor);
  }
}

void ResultFiles::commit() {
  for (const auto& writer : writers_) writer->complete();
  for (const auto& writer : writers_) writer->commit();
}

}  // namespace annulus::launcher
