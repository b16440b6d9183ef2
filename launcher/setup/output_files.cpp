#include "launcher/setup/output_files.hpp"

#include <span>
#include <string>

#include <fmt/format.h>

#include <annulus/attention/attention_weights.hpp>
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

void OutputFiles::write(const NamedSharding& sharding, const TensorView& shard, bool bhtd,
                        files::ArrayWriter& writer, std::size_t array) {
  if (!sharding.is_primary(group_.rank())) return;
  writer.write_slice(file_order(sharding.index(group_.rank()), bhtd), file_order(shard, bhtd),
                     array);
}

void OutputFiles::commit(const ring::LocalTensors& tensors, const ring::ShardedOperands& operands) {
  write(operands.output, tensors.output, bhtd_, *output_, 0);
  for (const RowResult& result : row_results_) {
    write(operands.lse, tensors.*result.tensor, false, result.writer ? *result.writer : *output_,
          result.array);
  }
  if (weights_) {
    write(ring::weights_sharding(problem_, operands), tensors.weights, false, *weights_, 0);
  }
  std::vector<files::ArrayWriter*> writers{output_.get()};
  for (const RowResult& result : row_results_) {
    if (result.writer) writers.push_back(result.writer.get());
  }
  if (weights_) writers.push_back(weights_.get());
  for (files::ArrayWriter* const writer : writers) writer->complete();
  for (files::ArrayWriter* const writer : writers) writer->commit();
}

}  // namespace annulus::launcher
