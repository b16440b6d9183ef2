#include <algorithm>
#include <array>
#include <cstddef>

#include <fmt/format.h>

#include <annulus/attention/features.hpp>
#include <annulus/attention/problem_class.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

constexpr std::array<std::string_view, 5> kNames{"none", "band", "segments", "blocks", "general"};
constexpr std::array<std::string_view, 2> kPasses{"forward", "backward"};

MaskKind kind_of(const FeatureSet& asked) {
  if (asked.intersects({Feature::bias, Feature::dense_mask, Feature::dropout})) {
    return MaskKind::general;
  }
  if (asked.contains(Feature::block_mask)) return MaskKind::blocks;
  if (asked.intersects({Feature::segments, Feature::lengths})) return MaskKind::segments;
  return asked.intersects(FeatureSet::positions()) ? MaskKind::band : MaskKind::none;
}

}  // namespace

std::string_view name_of(MaskKind kind) noexcept {
  return kNames[static_cast<std::size_t>(kind)];
}

MaskKind parse_mask_kind(std::string_view name) {
  const auto* const found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) {
    throw ArgumentError("mask", fmt::format("'{}'", name),
                        fmt::format("one of {}", fmt::join(kNames, ", ")));
  }
  return static_cast<MaskKind>(found - kNames.begin());
}

std::string_view name_of(Pass pass) noexcept {
  return kPasses[static_cast<std::size_t>(pass)];
}

Pass parse_pass(std::string_view name) {
  const auto* const found = std::find(kPasses.begin(), kPasses.end(), name);
  if (found == kPasses.end()) {
    throw ArgumentError("pass", fmt::format("'{}'", name), "forward or backward");
  }
  return static_cast<Pass>(found - kPasses.begin());
}

ProblemClass class_of(const AttentionProblem& problem, Pass pass) {
  const FeatureSet asked = features_of(problem);
  return {problem.dtype,
          problem.shape.head_dim,
          problem.shape.value_dim,
          kind_of(asked),
          asked.contains(Feature::soft_cap),
          pass};
}

std::string to_string(const ProblemClass& problem) {
  return fmt::format("{} D={} Dv={}, mask {}{}{}", name_of(problem.dtype), problem.head_dim,
                     problem.value_dim, name_of(problem.mask), problem.soft_cap ? ", soft cap" : "",
                     problem.pass == Pass::backward ? ", backward" : "");
}

}  // namespace annulus
