#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/attention/problem.hpp>

namespace annulus {

/// Features beyond plain attention that a problem may ask for: parts of its mask, and modifiers of
/// its logits and probabilities. A kernel declares the features that it supports, and is not given
/// a problem that asks for others. Sinks are not a feature: the plan adds them to the results of
/// any kernel.
enum class Feature : std::uint8_t {
  causal,  ///< with any offset
  window,  ///< likewise
  prefix,
  sink_tokens,
  chunk,
  offsets,    ///< one per batch
  documents,  ///< positions inside the documents of two packings
  segments,   ///< segment ids, and packed documents
  lengths,    ///< of queries or keys
  block_mask,
  soft_cap,
  dropout,
  float64,  ///< tensors or softmax in float64
  weights,  ///< attention weights as a result
  bias,
  dense_mask,
  unnormalised,  ///< output, with the row's maximum: see SoftmaxState
  // Call arguments: the kernel reads them anew in each call (see Implementation::make_kernel).
  varying_lengths,
  varying_offsets,
  varying_seed
};

[[nodiscard]] std::string_view name_of(Feature feature) noexcept;

class FeatureSet {
 public:
  constexpr FeatureSet() = default;
  constexpr FeatureSet(std::initializer_list<Feature> features) {
    for (const Feature feature : features) bits_ |= bit(feature);
  }
  /// The parts of a mask that compare positions. Mask::row_intervals() and PositionRule cover all
  /// of them.
  static constexpr FeatureSet positions() {
    return {Feature::causal, Feature::window,  Feature::prefix,   Feature::sink_tokens,
            Feature::chunk,  Feature::offsets, Feature::documents};
  }
  /// Values that change from call to call.
  static constexpr FeatureSet call_arguments() {
    return {Feature::varying_lengths, Feature::varying_offsets, Feature::varying_seed};
  }
  /// Every part of a mask and every modifier. float64 and weights are neither; call arguments are
  /// left out too.
  static constexpr FeatureSet all() {
    return positions() | FeatureSet{Feature::segments,   Feature::lengths,     Feature::soft_cap,
                                    Feature::dropout,    Feature::block_mask,  Feature::bias,
                                    Feature::dense_mask, Feature::unnormalised};
  }
  constexpr FeatureSet operator|(const FeatureSet& other) const {
    FeatureSet both;
    both.bits_ = bits_ | other.bits_;
    return both;
  }
  void add(Feature feature) noexcept { bits_ |= bit(feature); }
  [[nodiscard]] constexpr bool contains(Feature feature) const noexcept {
    return (bits_ & bit(feature)) != 0;
  }
  [[nodiscard]] constexpr bool empty() const noexcept { return bits_ == 0; }
  [[nodiscard]] constexpr bool intersects(const FeatureSet& other) const noexcept {
    return (bits_ & other.bits_) != 0;
  }
  /// The features that `other` lacks.
  [[nodiscard]] std::vector<Feature> missing_in(const FeatureSet& other) const;
  bool operator==(const FeatureSet&) const = default;

 private:
  static constexpr std::uint32_t bit(Feature feature) {
    return std::uint32_t{1} << static_cast<std::uint32_t>(feature);
  }
  std::uint32_t bits_ = 0;
};

/// The features that a problem asks for.
[[nodiscard]] FeatureSet features_of(const AttentionProblem& problem);

/// "causal, soft cap"; "none".
[[nodiscard]] std::string to_string(const FeatureSet& features);

}  // namespace annulus
