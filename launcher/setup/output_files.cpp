#include "launcher/setup/output_files.hpp"

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <annulus/attention/attention_weights.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/partition/reshard.hpp>
#include <annulus/ring/attention_weights.hpp>

#include "launcher/options/file_names.hpp"
#include "launcher/setup/input_tensors.hpp"

namespace annulus::launcher {

OutputFiles::OutputFiles(const Options& options, const AttentionProblem& problem, Control& group)
    : problem_(problem), group_(group), bhtd_(options.bhtd) {
  const AttentionShape& shape = problem.shape;
  const Extents output{shape.batch, shape.query_length, shape.heads, shape.value_dim};
  std::vector<files::ArraySpec> arrays{{"output", problem.dtype, file_order(output, bhtd_)}};
  const auto add = [&](const char* name, const std::string& path,
                       TensorView ring::LocalTensors::*tensor) {
    if (path.empty()) return;
    const files::ArraySpec array{
        name, DType::float32, {shape.batch, shape.heads, shape.query_length}};
    if (beside_output(options, path)) {
      row_results_.push_back({tensor, nullptr, arrays.size()});
      arrays.push_back(array);
    } else {
      row_results_.push_back(
          {tensor,
           std::make_unique<files::ArrayWriter>(group, path, std::vector<files::ArraySpec>{array},
                                                fmt::format("--{} {}", name, path)),
           0});
    }
  };
  add("lse", options.lse, &ring::LocalTensors::lse);
  add("maximum", options.maximum, &ring::LocalTensors::maximum);
  add("sum", options.sum, &ring::LocalTensors::sum);
  output_ = std::make_unique<files::ArrayWriter>(group, options.output, std::move(arrays),
                                                 "--output " + options.output);
  if (problem.weights) {
    const Extents weights{shape.batch, shape.heads, shape.query_length, shape.kv_length};
    weights_ = std::make_unique<files::ArrayWriter>(
        group, options.weights,
        std::vector<files::ArraySpec>{{"weights", weights_dtype(problem), weights}},
        "--weights " + options.weights);
  }
}

namespace {

// True if rows of a striped sequence, each of which needs its own write, are less than a page.
bool is_scattered(const NamedSharding& sharding, int sequence, DType dtype, bool bhtd) {
  constexpr std::int64_t kPage = 4096;
  const Distribution& distribution = sharding.distribution(sequence);
  if (distribution.kind() != Distribution::Kind::sequence ||
      distribution.layout() != LayoutKind::striped || sharding.shards(sequence) == 1) {
    return false;
  }
  const Extents shape = file_order(sharding.local_shape(0), bhtd);
  auto row = static_cast<std::int64_t>(size_of(dtype));
  for (int dim = bhtd ? 3 : sequence + 1; dim < shape.rank(); ++dim) row *= shape[dim];
  return row < kPage;
}

// The same sharding, but with neighbouring rows on each rank.
NamedSharding without_stripes(const NamedSharding& sharding, int sequence) {
  std::vector<Distribution> distributions;
  for (int dim = 0; dim < sharding.dimensions(); ++dim) {
    distributions.push_back(dim == sequence ? Distribution::sequence()
                                            : sharding.distribution(dim));
  }
  return {sharding.mesh(), sharding.spec(), sharding.global_shape(), std::move(distributions)};
}

}  // namespace

void OutputFiles::write(const NamedSharding& sharding, int sequence, const TensorView& shard,
                        bool bhtd, Mesh& mesh, files::ArrayWriter& writer, std::size_t array) {
  if (is_scattered(sharding, sequence, shard.dtype(), bhtd)) {
    const NamedSharding whole = without_stripes(sharding, sequence);
    const Tensor rows = collectively(group_, [&] {
      return Tensor(shard.dtype(), whole.local_shape(group_.rank()), host_.memory());
    });
    const std::unique_ptr<Stream> stream = host_.make_stream("files", mesh.watchdog(), nullptr);
    reshard(mesh, host_, *stream, sharding, shard, whole, rows.view());
    write(whole, sequence, rows.view(), bhtd, mesh, writer, array);
    return;
  }
  if (!sharding.is_primary(group_.rank())) return;
  writer.write_slice(file_order(sharding.index(group_.rank()), bhtd), file_order(shard, bhtd),
                     array);
}

void OutputFiles::commit(const ring::LocalTensors& tensors, const ring::ShardedOperands& operands,
                         Mesh& mesh, const std::vector<files::ArrayWriter*>& beside) {
  write(operands.output, 1, tensors.output, bhtd_, mesh, *output_, 0);
  for (const RowResult& result : row_results_) {
    write(operands.lse, 2, tensors.*result.tensor, false, mesh,
          result.writer ? *result.writer : *output_, result.array);
  }
  if (weights_) {
    write(ring::weights_sharding(problem_, operands), 2, tensors.weights, false, mesh, *weights_,
          0);
  }
  std::vector<files::ArrayWriter*> writers{output_.get()};
  for (const RowResult& result : row_results_) {
    if (result.writer) writers.push_back(result.writer.get());
  }
  if (weights_) writers.push_back(weights_.get());
  writers.insert(writers.end(), beside.begin(), beside.end());
  for (files::ArrayWriter* const writer : writers) writer->complete();
  for (files::ArrayWriter* const writer : writers) writer->commit();
}

}  // namespace annulus::launcher
