#include <array>
#include <cstddef>

#include <annulus/attention/features.hpp>

namespace annulus {
namespace {

constexpr std::array kFeatures{Feature::causal, Feature::window, Feature::segments,
                               Feature::lengths, Feature::soft_cap};

}  // namespace

std::string_view name_of(Feature feature) noexcept {
  constexpr std::array<std::string_view, kFeatures.size()> kNames{
      "causal masks", "windows", "segment ids", "lengths", "a soft cap"};
  return kNames[static_cast<std::size_t>(feature)];
}

std::vector<Feature> FeatureSet::missing_in(const FeatureSet& other) const {
  std::vector<Feature> missing;
  for (const Feature feature : kFeatures) {
    if (contains(feature) && !other.contains(feature)) missing.push_back(feature);
  }
  return missing;
}

FeatureSet features_of(const AttentionProblem& problem) {
  FeatureSet features;
  const Mask& mask = problem.mask;
  if (mask.causal()) features.add(Feature::causal);
  if (mask.window_left() >= 0 || mask.window_right() >= 0) features.add(Feature::window);
  if (mask.has_segments()) features.add(Feature::segments);
  if (!mask.query_lengths().empty() || !mask.kv_lengths().empty()) {
    features.add(Feature::lengths);
  }
  if (problem.soft_cap) features.add(Feature::soft_cap);
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
