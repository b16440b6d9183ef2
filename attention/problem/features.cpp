#include <bit>

#include <annulus/attention/features.hpp>

namespace annulus {
std::string_view name_of(Feature feature) noexcept {
  switch (feature) {  // the compiler misses one that is added
    case Feature::causal:
      return "causal masks";
    case Feature::window:
      return "windows";
    case Feature::prefix:
      return "a prefix";
    case Feature::sink_tokens:
      return "sink tokens";
    case Feature::chunk:
      return "chunks";
    case Feature::offsets:
      return "an offset per batch";
    case Feature::documents:
      return "positions inside documents";
    case Feature::segments:
      return "segment ids";
    case Feature::lengths:
      return "lengths";
    case Feature::block_mask:
      return "a block mask";
    case Feature::soft_cap:
      return "a soft cap";
    case Feature::dropout:
      return "dropout";
    case Feature::float64:
      return "float64 (as dtype or softmax dtype)";
    case Feature::weights:
      return "a request for attention weights";
    case Feature::bias:
      return "a bias";
    case Feature::dense_mask:
      return "a dense mask";
    case Feature::unnormalised:
      return "an unnormalised output";
    case Feature::varying_lengths:
      return "lengths as call arguments";
    case Feature::varying_offsets:
      return "offsets as call arguments";
    case Feature::varying_seed:
      return "a dropout seed as call argument";
  }
  return "a feature without a name";
}

// By their bits, not by a list: what no list has must not pass for honoured.
std::vector<Feature> FeatureSet::missing_in(const FeatureSet& other) const {
  std::vector<Feature> missing;
  for (std::uint32_t left = bits_ & ~other.bits_; left != 0; left &= left - 1) {
    missing.push_back(static_cast<Feature>(std::countr_zero(left)));
  }
  return missing;
}

FeatureSet features_of(const AttentionProblem& problem) {
  FeatureSet features;
  const Mask& mask = problem.mask;
  const PositionParts& positions = mask.position_parts();
  if (positions.causal) features.add(Feature::causal);
  if (positions.window()) features.add(Feature::window);
  if (positions.chunk > 0) features.add(Feature::chunk);
  if (positions.limited()) {  // these change what the others hide
    if (mask.has_prefix()) features.add(Feature::prefix);
    if (!mask.offsets().empty() || problem.call_arguments.offsets) features.add(Feature::offsets);
    if (problem.call_arguments.offsets) features.add(Feature::varying_offsets);
    if (mask.has_packings()) features.add(Feature::documents);
  }
  if (positions.sink_tokens > 0 && (positions.window() || positions.chunk > 0)) {
    features.add(Feature::sink_tokens);
  }
  if (mask.has_segments()) features.add(Feature::segments);
  const bool varying_lengths = problem.call_arguments.lengths;
  if (!mask.query_lengths().empty() || !mask.kv_lengths().empty() || varying_lengths) {
    features.add(Feature::lengths);
  }
  if (varying_lengths) features.add(Feature::varying_lengths);
  if (mask.block_mask()) features.add(Feature::block_mask);
  if (problem.soft_cap) features.add(Feature::soft_cap);
  if (problem.dropout && problem.dropout->threshold() > 0) features.add(Feature::dropout);
  if (problem.call_arguments.dropout_seed) features.add(Feature::varying_seed);
  if (problem.bias) features.add(Feature::bias);
  if (problem.dense_mask) features.add(Feature::dense_mask);
  if (problem.dtype == DType::float64 || problem.softmax_dtype == DType::float64) {
    features.add(Feature::float64);
  }
  if (problem.weights) features.add(Feature::weights);
  if (!problem.normalize_output) features.add(Feature::unnormalised);
  return features;
}

std::string to_string(const FeatureSet& features) {
  std::string text;
  for (const Feature feature : features.missing_in({})) {
    text += (text.empty() ? "" : ", ") + std::string(name_of(feature));
  }
  return text.empty() ? "none" : text;
}

}  // namespace annulus
