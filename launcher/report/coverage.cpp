#include "launcher/report/coverage.hpp"

#include <array>
#include <optional>

#include <fmt/format.h>

#include <annulus/attention/features.hpp>

#include "launcher/report/cells.hpp"

namespace annulus::launcher {
namespace {

constexpr const char* kSinks = "sinks";

// Mask parts and modifiers. Sinks are passed separately, as they are not a feature of kernels.
std::vector<std::string> parts_of(const FeatureSet& features, bool sinks) {
  std::vector<std::string> parts;
  for (const Feature feature : features.missing_in({})) {
    if (FeatureSet::all().contains(feature)) parts.emplace_back(name_of(feature));
  }
  if (sinks) parts.emplace_back(kSinks);
  return parts;
}

std::vector<std::string> all_parts() {
  return parts_of(FeatureSet::all(), true);
}

std::string counts_text(const std::vector<std::string>& names,
                        const std::map<std::string, int>& counts) {
  std::string text;
  for (const std::string& name : names) {
    const auto found = counts.find(name);
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name,
                        found == counts.end() ? 0 : found->second);
  }
  return text;
}

template <class Kinds>
std::vector<std::string> names_of(const Kinds& kinds) {
  std::vector<std::string> names;
  for (const auto kind : kinds) names.emplace_back(annulus::name_of(kind));
  return names;
}

}  // namespace

void Coverage::add(const verification::ShardedCase& sharded, std::string_view schedule) {
  const AttentionProblem& problem = sharded.problem;
  const ring::OperandLayout& layout = sharded.layout;
  const std::vector<std::string> parts = parts_of(features_of(problem), problem.sinks.has_value());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    ++parts_[parts[i]];
    for (std::size_t j = i + 1; j < parts.size(); ++j) ++pairs_[{parts[i], parts[j]}];
  }
  ++layouts_[std::string(annulus::name_of(layout.sequence))];
  const bool differ = layout.kv_sequence.value_or(layout.sequence) != layout.sequence;
  other_for_keys_ += differ ? 1 : 0;
  wide_softmax_ += problem.softmax_dtype == DType::float64 ? 1 : 0;
  ++dtypes_[std::string(annulus::name_of(problem.dtype))];
  ++schedules_[std::string(schedule)];
  // In drawn cases, only inputs that are not finite have fills.
  non_finite_columns_ += sharded.fills.key ? 1 : 0;
  non_finite_queries_ += sharded.fills.query ? 1 : 0;
  if (!sharded.backward) {
    ++without_backward_[!problem.normalize_output ? "unnormalised outputs"
                        : sharded.fills.key       ? "NaN or infinities"
                                                  : "others"];
  }
  const auto has_rows = [](const std::optional<Extents>& scores) {
    return scores && (*scores)[2] != 1;
  };
  if (has_rows(problem.bias) || has_rows(problem.dense_mask)) ++with_rows_[std::string(schedule)];
}

void Coverage::add_backward(std::string_view schedule, const ring::BackwardRequest& request) {
  ++backward_[std::string(schedule)];
  gradients_of_lse_ += request.grad_lse ? 1 : 0;
  added_gradients_ += request.adds ? 1 : 0;
}

std::vector<std::pair<std::string, std::string>> Coverage::lines() const {
  constexpr std::array kLayouts{LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped,
                                LayoutKind::balanced};
  constexpr std::array kDtypes{DType::float32, DType::float16, DType::bfloat16, DType::float64};
  const std::vector<std::string> parts = all_parts();
  const FeatureSet by_position{Feature::causal, Feature::window, Feature::prefix,
                               Feature::sink_tokens, Feature::chunk};
  const FeatureSet by_batch{Feature::offsets, Feature::documents, Feature::segments,
                            Feature::lengths};
  const FeatureSet by_entry{Feature::block_mask, Feature::dense_mask};
  const FeatureSet modifiers{Feature::soft_cap, Feature::dropout, Feature::bias,
                             Feature::unnormalised};
  constexpr int kNamed = 2;  // so that a line fits a terminal
  int pairs = 0;
  int never = 0;
  std::string missing;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (std::size_t j = i + 1; j < parts.size(); ++j) {
      ++pairs;
      if (pairs_.contains({parts[i], parts[j]})) continue;
      if (++never > kNamed) continue;
      missing +=
          fmt::format("{}{} with {}", missing.empty() ? "; never " : ", ", parts[i], parts[j]);
    }
  }
  if (never > kNamed) missing += fmt::format(" and {} more", never - kNamed);
  return {{"masks by position", counts_text(parts_of(by_position, false), parts_)},
          {"masks by batch", counts_text(parts_of(by_batch, false), parts_)},
          {"masks by entry", counts_text(parts_of(by_entry, false), parts_)},
          {"modifiers", counts_text(parts_of(modifiers, true), parts_)},
          {"pairs of parts", fmt::format("{} of {}{}", pairs_.size(), pairs, missing)},
          {"layouts", fmt::format("{}, another one for keys {}",
                                  counts_text(names_of(kLayouts), layouts_), other_for_keys_)},
          {"dtypes", fmt::format("{}, a softmax in float64 {}",
                                 counts_text(names_of(kDtypes), dtypes_), wide_softmax_)},
          {"NaN and infinities", fmt::format("in keys and values {}, in queries too {}",
                                             non_finite_columns_, non_finite_queries_)},
          {"schedules", counts_text(schedules_)},
          {"rows of bias or mask", counts_text(with_rows_)},
          {"backward passes",
           backward_.empty()
               ? "none"
               : fmt::format("{}; with a gradient of the LSE {}, added {}", counts_text(backward_),
                             gradients_of_lse_, added_gradients_)},
          {"without a backward pass",
           without_backward_.empty() ? "none" : counts_text(without_backward_)}};
}

}  // namespace annulus::launcher
