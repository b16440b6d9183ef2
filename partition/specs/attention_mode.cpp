#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/sharding_rules.hpp>

namespace annulus {

std::string_view name_of(AttentionMode mode) noexcept {
  switch (mode) {
    case AttentionMode::train:
      return "train";
    case AttentionMode::prefill:
      return "prefill";
    case AttentionMode::autoregressive:
      return "autoregressive";
    case AttentionMode::insert:
      break;
  }
  return "insert";
}

AttentionMode parse_attention_mode(std::string_view name) {
  for (const AttentionMode mode : kAttentionModes) {
    if (name_of(mode) == name) return mode;
  }
  throw ArgumentError("mode", fmt::format("'{}'", name),
                      "train, prefill, autoregressive or insert");
}

AttentionMode infer_attention_mode(std::int64_t query_length) noexcept {
  return query_length == 1 ? AttentionMode::autoregressive : AttentionMode::train;
}

}  // namespace annulus
