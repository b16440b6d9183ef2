#pragma once

#include <annulus/ring/metadata.hpp>

namespace annulus {

/// Calls visit(key, member of AttentionMetadata, member of MetadataFields) for every field, in the
/// order of the JSON. The key is the field's name, in JSON and in messages.
template <class Visit>
void for_each_metadata_field(Visit&& visit) {
  using M = AttentionMetadata;
  using F = MetadataFields;
  visit("runtime_dtype", &M::runtime_dtype, &F::runtime_dtype);
  visit("runtime_softmax_dtype", &M::runtime_softmax_dtype, &F::runtime_softmax_dtype);
  visit("softmax_scale", &M::softmax_scale, &F::softmax_scale);
  visit("soft_cap", &M::soft_cap, &F::soft_cap);
  visit("dropout_prob", &M::dropout_prob, &F::dropout_prob);
  visit("dropout_seed", &M::dropout_seed, &F::dropout_seed);
  visit("normalize_output", &M::normalize_output, &F::normalize_output);
  visit("blocksize_q", &M::blocksize_q, &F::blocksize_q);
  visit("blocksize_k", &M::blocksize_k, &F::blocksize_k);
  visit("blocksize_b", &M::blocksize_b, &F::blocksize_b);
  visit("sequence_axis_name", &M::sequence_axis_name, &F::sequence_axis_name);
  visit("scan_ring_attention", &M::scan_ring_attention, &F::scan_ring_attention);
  visit("mesh", &M::mesh, &F::mesh);
  visit("sharding_rules", &M::sharding_rules, &F::sharding_rules);
  visit("backend", &M::backend, &F::backend);
  visit("mode", &M::mode, &F::mode);
  visit("implementation", &M::implementation, &F::implementation);
}

}  // namespace annulus
