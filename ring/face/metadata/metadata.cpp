#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/metadata.hpp>

#include "face/metadata/fields.hpp"

namespace annulus {
namespace {

constexpr const char* kDefaultAxis = "sp";

void expect(bool fits, const char* field, const std::string& value, const char* expected) {
  if (!fits) throw ArgumentError(field, value, expected);
}

void overlay(AttentionMetadata& metadata, const MetadataFields& fields) {
  for_each_metadata_field([&](const char* /*key*/, auto value, auto given) {
    if (fields.*given) metadata.*value = *(fields.*given);
  });
}

bool has_rule(const ShardingRules& rules, SemanticAxis axis) {
  for (const ShardingRule& rule : rules.rules()) {
    if (rule.axis == axis && !rule.mode) return true;
  }
  return false;
}

}  // namespace

std::string_view name_of(Backend backend) noexcept {
  switch (backend) {
    case Backend::automatic:
      return "auto";
    case Backend::cpu:
      return "cpu";
    case Backend::cuda:
      break;
  }
  return "cuda";
}

Backend parse_backend(std::string_view name) {
  for (const Backend backend : {Backend::automatic, Backend::cpu, Backend::cuda}) {
    if (name_of(backend) == name) return backend;
  }
  if (name == "gpu") return Backend::cuda;  // as EasyDeL calls it
  throw ArgumentError("backend", fmt::format("'{}'", name), "auto, cpu or cuda");
}

AttentionMetadata AttentionMetadata::resolve(const MetadataFields& explicit_fields,
                                             const MetadataFields& file,
                                             const MetadataFields& environment) {
  AttentionMetadata metadata;
  overlay(metadata, environment);
  overlay(metadata, file);
  overlay(metadata, explicit_fields);
  metadata.validate();
  return metadata;
}

AttentionMetadata AttentionMetadata::replace(const MetadataFields& fields) const {
  AttentionMetadata changed = *this;
  overlay(changed, fields);
  changed.validate();
  return changed;
}

void AttentionMetadata::validate() const {
  using Float = std::numeric_limits<float>;
  const auto name = [](DType dtype) { return std::string(name_of(dtype)); };
  const auto number = [](double value) { return fmt::format("{}", value); };
  expect(is_floating(runtime_dtype), "runtime_dtype", name(runtime_dtype),
         "float16, bfloat16, float32 or float64");
  expect(runtime_softmax_dtype == DType::float32 || runtime_softmax_dtype == DType::float64,
         "runtime_softmax_dtype", name(runtime_softmax_dtype), "float32 or float64");
  expect(!softmax_scale || std::abs(*softmax_scale) <= Float::max(), "softmax_scale",
         number(softmax_scale.value_or(0)), "a number that is finite in float32");
  expect(!soft_cap || (*soft_cap >= Float::min() && *soft_cap <= Float::max()), "soft_cap",
         number(soft_cap.value_or(0)), "a positive number in float32's normal range");
  expect(dropout_prob >= 0 && dropout_prob < 1, "dropout_prob", number(dropout_prob),
         "a probability, at least 0 and below 1");
  expect(blocksize_q >= 1, "blocksize_q", std::to_string(blocksize_q), "at least 1");
  expect(blocksize_k >= 1, "blocksize_k", std::to_string(blocksize_k), "at least 1");
  expect(blocksize_b >= 1, "blocksize_b", std::to_string(blocksize_b), "at least 1");
  expect(!sequence_axis_name.empty(), "sequence_axis_name", "''", "the name of a mesh axis");
  expect(!mesh || !mesh->empty(), "mesh", "''", "axes and their sizes, such as dp=2,sp=-1");
  expect(!implementation.empty(), "implementation", "''", "auto or a name in the registry");
}

AttentionMode AttentionMetadata::mode_of(std::int64_t query_length) const noexcept {
  return mode.value_or(infer_attention_mode(query_length));
}

ShardingRules AttentionMetadata::rules() const {
  ShardingRules rules = sharding_rules;
  if (sequence_axis_name == kDefaultAxis) return rules;
  for (const SemanticAxis axis : {SemanticAxis::query_length, SemanticAxis::kv_length}) {
    if (!has_rule(sharding_rules, axis)) rules.set({axis, std::nullopt, {sequence_axis_name}});
  }
  return rules;
}

std::string AttentionMetadata::mesh_text() const {
  return mesh.value_or(sequence_axis_name + "=-1");
}

std::vector<std::string> AttentionMetadata::unused_hints() const {
  const AttentionMetadata defaults;
  std::vector<std::string> sentences;
  const auto check = [&](const char* field, std::int64_t value, std::int64_t default_value) {
    if (value == default_value) return;
    sentences.push_back(
        fmt::format("{} = {} has no effect: kernels choose their own tiles", field, value));
  };
  check("blocksize_q", blocksize_q, defaults.blocksize_q);
  check("blocksize_k", blocksize_k, defaults.blocksize_k);
  check("blocksize_b", blocksize_b, defaults.blocksize_b);
  if (!scan_ring_attention) {
    sentences.emplace_back(
        "scan_ring_attention = false has no effect: rings are always planned hop by hop");
  }
  return sentences;
}

}  // namespace annulus
