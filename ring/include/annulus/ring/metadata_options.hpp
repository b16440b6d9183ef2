#pragma once

#include <annulus/attention/metadata.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>

namespace annulus {

/// The mesh and the place that the metadata ask for. Backend cuda means the CUDA device that is
/// current in the calling thread; without one, the constructor of Context throws.
[[nodiscard]] ContextOptions context_options(const AttentionMetadata& metadata);

/// The options that the metadata give for calls of this shape; the mask is not part of metadata.
/// Throws what AttentionMetadata::validate() throws.
///
///     const AttentionMetadata metadata = AttentionMetadata::resolve({.soft_cap = 30.0},
///         parse_metadata(text, "metadata.json").fields, metadata_from_environment().fields);
///     Context context(communicator, context_options(metadata));
///     Attention attention(context, attention_options(metadata, shape, mask));
[[nodiscard]] AttentionOptions attention_options(const AttentionMetadata& metadata,
                                                 const AttentionShape& shape,
                                                 const Mask& mask = {});

}  // namespace annulus
