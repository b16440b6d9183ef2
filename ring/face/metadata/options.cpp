#include <annulus/core/cuda.hpp>
#include <annulus/core/foreign_stream.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/metadata.hpp>

namespace annulus {
namespace {

// Device 0 if there is no GPU; Context then throws the reason.
Place current_device() {
  return Place::cuda(cuda_unavailable_reason().empty() ? current_cuda_device() : 0);
}

}  // namespace

ContextOptions context_options(const AttentionMetadata& metadata) {
  ContextOptions options;
  options.mesh = metadata.mesh_text();
  if (metadata.backend == Backend::cpu) options.place = Place::host();
  if (metadata.backend == Backend::cuda) options.place = current_device();
  return options;
}

AttentionOptions attention_options(const AttentionMetadata& metadata, const AttentionShape& shape,
                                   const Mask& mask) {
  metadata.validate();
  AttentionOptions options;
  options.shape = shape;
  options.dtype = metadata.runtime_dtype;
  options.mask = mask;
  options.scale = metadata.softmax_scale;
  options.soft_cap = metadata.soft_cap;
  if (metadata.dropout_prob > 0) {
    options.dropout.emplace(metadata.dropout_prob, metadata.dropout_seed);
  }
  options.softmax_dtype = metadata.runtime_softmax_dtype;
  options.normalize_output = metadata.normalize_output;
  options.rules = metadata.rules();
  options.mode = metadata.mode_of(shape.query_length);
  options.implementation = metadata.implementation;
  return options;
}

}  // namespace annulus
