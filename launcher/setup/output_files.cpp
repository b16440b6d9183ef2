#include "launcher/setup/output_files.hpp"

#include <span>
#include <string>

#include <annulus/attention/attention_weights.hpp>
#include <annulus/core/error.hpp>
#include <annulus/ring/attention_weights.hpp>

#include "launcher/options/file_names.hpp"
#include "launcher/setup/input_tensors.hpp"

namespace annulus::launcher {
void check_output_is_given(const Options& options) {
  if (options.output.empty()) {
    throw ArgumentError("--output", "nothing", "a .npy or .safetensors file");
  }
}

OutputFiles::OutputFiles(const Options& options, const AttentionProblem& problem, Control& group)
    : problem_(problem),
      group_(group),
      bhtd_(options.bhtd),
      lse_beside_output_(lse_beside_output(options)) {
  const AttentionShape& shape = problem.shape;
  const Extents output{shape.batch, shape.query_length, shape.heads, shape.value_dim};
  const files::ArraySpec lse{"lse", DType::float32, {shape.batch, shape.heads, shape.query_length}};
  std::vector<files::ArraySpec> arrays{{"output", problem.dtype, file_order(output, bhtd_)}};
  if (lse_beside_output_) arrays.push_back(lse);
  output_ = std::make_unique<files::ArrayWriter>(group, options.output, std::move(arrays),
                                                 "--output " + options.output);
  if (!options.lse.empty() && !lse_beside_output_) {
    lse_ = std::make_unique<files::ArrayWriter>(
        group, options.lse, std::vector<files::ArraySpec>{lse}, "--lse " + options.lse);
  }
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

void OutputFiles::commit(const ring::LocalTensors& tensors, const TensorView& weights,
                         const ring::ShardedOperands& operands) {
  write(operands.output, tensors.output, bhtd_, *output_, 0);
  if (lse_beside_output_) write(operands.lse, tensors.lse, false, *output_, 1);
  if (lse_) write(operands.lse, tensors.lse, false, *lse_, 0);
  if (weights_) write(ring::weights_sharding(problem_, operands), weights, false, *weights_, 0);
  output_->commit();
  if (lse_) lse_->commit();
  if (weights_) weights_->commit();
}

}  // namespace annulus::launcher
