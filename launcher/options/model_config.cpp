#include "launcher/options/model_config.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>
#include <annulus/core/json_nesting.hpp>

namespace annulus::launcher {
namespace {

using nlohmann::json;

constexpr const char* kFull = "full_attention";
constexpr const char* kSliding = "sliding_attention";
constexpr const char* kChunked = "chunked_attention";

/// A configuration whose values are checked as they are read.
class Config {
 public:
  Config(json values, std::string source)
      : values_(std::move(values)), source_(std::move(source)) {}

  [[noreturn]] void fail(const std::string& problem) const { throw FileError(source_, problem); }

  /// Null counts as absent, as in transformers.
  [[nodiscard]] const json* find(const char* key) const {
    const auto found = values_.find(key);
    return found == values_.end() || found->is_null() ? nullptr : &*found;
  }
  [[nodiscard]] std::optional<std::int64_t> integer(const char* key) const {
    constexpr std::int64_t kMaximum = std::int64_t{1} << 48;
    return get<std::int64_t>(key, "a whole number of 1 or more", [](const json& value) {
      return value.is_number_integer() && value >= 1 && value <= kMaximum;
    });
  }
  [[nodiscard]] std::optional<double> positive(const char* key) const {
    return get<double>(key, "a positive number", [](const json& value) {
      return value.is_number() && value.get<double>() > 0;
    });
  }
  [[nodiscard]] std::optional<bool> flag(const char* key) const {
    return get<bool>(key, "a bool", [](const json& value) { return value.is_boolean(); });
  }
  [[nodiscard]] std::string text(const char* key) const {
    const json* const value = find(key);
    return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
  }

 private:
  template <class Value, class IsRight>
  std::optional<Value> get(const char* key, const char* expected, const IsRight& is_right) const {
    const json* const value = find(key);
    if (value == nullptr) return {};
    if (!is_right(*value)) {
      fail(fmt::format("{} = {}, expected {}", key,
                       value->dump(-1, ' ', false, json::error_handler_t::replace), expected));
    }
    return value->get<Value>();
  }

  json values_;
  std::string source_;
};

json parse(std::string_view text, const std::string& source) {
  if (nests_too_deep(text)) throw FileError(source, "nests too deep for a model's configuration");
  json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) throw FileError(source, "is not a JSON object");
  // A multimodal model keeps the configuration of its attention one level deeper.
  const auto inner = parsed.find("text_config");
  if (parsed.contains("num_attention_heads") || inner == parsed.end() || !inner->is_object()) {
    return parsed;
  }
  json of_text = *inner;
  for (const char* key : {"architectures", "torch_dtype", "dtype"}) {
    if (!of_text.contains(key) && parsed.contains(key)) of_text[key] = parsed[key];
  }
  return of_text;
}

ModelSizes sizes_of(const Config& config) {
  const auto heads = config.integer("num_attention_heads");
  if (!heads) config.fail("lacks num_attention_heads: expected a config.json of transformers");
  const std::int64_t kv_heads = config.integer("num_key_value_heads").value_or(*heads);
  if (*heads % kv_heads != 0) {
    config.fail(
        fmt::format("num_attention_heads = {} is not a multiple of num_key_value_heads = {}",
                    *heads, kv_heads));
  }
  if (const auto dim = config.integer("head_dim")) return {*heads, kv_heads, *dim};
  const auto hidden = config.integer("hidden_size");
  if (!hidden || *hidden % *heads != 0) {
    config.fail("lacks head_dim, and hidden_size is no multiple of num_attention_heads");
  }
  return {*heads, kv_heads, *hidden / *heads};
}

// The layers of Llama 4, whose published files hold no layer_types: as in transformers, layers with
// rotary positions see chunks and other layers see everything. no_rope_layers has 1 for the former;
// without it, every fourth layer is one of the latter.
std::vector<std::string> chunked_kinds(const Config& config) {
  const auto layers = config.integer("num_hidden_layers");
  if (!layers || *layers > kMaximumLayers) {
    config.fail("has attention_chunk_size without layer_types, and no usable num_hidden_layers");
  }
  std::vector<std::string> kinds(static_cast<std::size_t>(*layers), kChunked);
  const json* const rotary = config.find("no_rope_layers");
  if (rotary != nullptr && !rotary->is_array()) config.fail("no_rope_layers: expected a list");
  if (rotary == nullptr || rotary->empty()) {
    const auto interval =
        static_cast<std::size_t>(config.integer("no_rope_layer_interval").value_or(4));
    for (std::size_t i = interval; i <= kinds.size(); i += interval) kinds[i - 1] = kFull;
    return kinds;
  }
  if (rotary->size() != kinds.size()) {
    config.fail(fmt::format("no_rope_layers: has {} entries, expected one of each of {} layers",
                            rotary->size(), kinds.size()));
  }
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    if ((*rotary)[i] != 0 && (*rotary)[i] != 1) config.fail("no_rope_layers: expected 0 and 1");
    if ((*rotary)[i] == 0) kinds[i] = kFull;
  }
  return kinds;
}

// The kinds of all layers, or one kind if the configuration does not count layers.
std::vector<std::string> layer_kinds(const Config& config) {
  if (const json* const types = config.find("layer_types")) {
    std::vector<std::string> kinds;
    for (const json& type : types->is_array() ? *types : json::array()) {
      if (!type.is_string()) config.fail("layer_types: expected a list of names");
      kinds.push_back(type.get<std::string>());
    }
    if (kinds.empty()) config.fail("layer_types: expected a list of names");
    return kinds;
  }
  const std::string type = config.text("model_type");
  if (type.starts_with("llama4")) return chunked_kinds(config);
  if (config.find("attention_chunk_size")) {
    if (config.find("no_rope_layers")) return chunked_kinds(config);
    config.fail("has attention_chunk_size without layer_types, which say what layers see chunks");
  }
  const std::int64_t layers = config.integer("num_hidden_layers").value_or(1);
  std::vector<std::string> kinds(static_cast<std::size_t>(std::min(layers, kMaximumLayers)), kFull);
  if (!config.find("sliding_window") || !config.flag("use_sliding_window").value_or(true)) {
    return kinds;
  }
  // With older files, the code of the model decides which layers slide.
  const auto pattern = config.integer("sliding_window_pattern")
                           .value_or(type.starts_with("gemma3")   ? 6
                                     : type.starts_with("gemma2") ? 2
                                                                  : 0);
  const bool counts_layers = config.flag("use_sliding_window").has_value();
  const auto first = counts_layers ? config.integer("max_window_layers").value_or(0) : 0;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const auto layer = static_cast<std::int64_t>(i);
    const bool slides = pattern > 0 ? (layer + 1) % pattern != 0 : layer >= first;
    if (slides) kinds[i] = kSliding;
  }
  return kinds;
}

std::string kind_of(const Config& config, std::optional<std::int64_t> layer) {
  const std::vector<std::string> kinds = layer_kinds(config);
  const auto count = static_cast<std::int64_t>(kinds.size());
  if (layer && *layer >= count && config.find("num_hidden_layers")) {
    throw ArgumentError("layer", fmt::format("{}", *layer), fmt::format("0 to {}", count - 1));
  }
  if (layer) return kinds[static_cast<std::size_t>(std::min(*layer, count - 1))];
  const std::set<std::string> distinct(kinds.begin(), kinds.end());
  if (distinct.size() > 1) {
    throw ArgumentError(
        "layer", "nothing",
        fmt::format("one of 0 to {}, as the model's layers differ ({}; layer 0: {})", count - 1,
                    fmt::join(distinct, ", "), kinds.front()));
  }
  return kinds.front();
}

// True if every token sees the tokens to its right. Gemma has names besides the flag: "vision" is
// for pictures only, so text stays causal. Absent if the configuration does not say.
std::optional<bool> is_bidirectional(const Config& config) {
  constexpr const char* kKey = "use_bidirectional_attention";
  const std::string name = config.text(kKey);
  if (name.empty()) return config.flag(kKey);
  if (name != "all" && name != "vision") {
    config.fail(fmt::format("{} = '{}', expected a bool, 'all' or 'vision'", kKey, name));
  }
  return name == "all";
}

// With use_bidirectional_attention, transformers halves sliding_window, so that it counts the keys
// of both sides. Other bidirectional models see sliding_window keys on either side. As causal
// models count the row's own key, without --causal they see one key less on either side.
ModelWindow window_of(const Config& config, std::int64_t size, bool causal) {
  if (is_bidirectional(config).value_or(false)) return {size / 2, size / 2};
  return {size - 1, causal ? size - 1 : size};
}

void set_kind(ModelLayer& result, const Config& config, const std::string& kind) {
  if (kind == kSliding) {
    const auto window = config.integer("sliding_window");
    if (!window) config.fail("a layer is sliding_attention, but sliding_window is missing");
    result.window = window_of(config, *window, result.causal.value_or(false));
  } else if (kind == kChunked) {
    result.chunk = config.integer("attention_chunk_size");
    if (!result.chunk) {
      config.fail("a layer is chunked_attention, but attention_chunk_size is missing");
    }
  } else if (kind != kFull) {
    config.fail(
        fmt::format("a layer is {}; expected {}, {} or {}", kind, kFull, kSliding, kChunked));
  }
}

// Models that generate text are causal; a configuration says so by the names of its architectures.
std::optional<bool> is_causal(const Config& config) {
  const std::optional<bool> bidirectional = is_bidirectional(config);
  if (bidirectional == true) return false;
  if (const auto causal = config.flag("is_causal")) return *causal;
  if (bidirectional == false) return true;
  const json* const names = config.find("architectures");
  for (const json& name : names != nullptr && names->is_array() ? *names : json::array()) {
    if (!name.is_string()) continue;
    for (const char* known : {"CausalLM", "LMHeadModel", "ConditionalGeneration"}) {
      if (name.get<std::string>().find(known) != std::string::npos) return true;
    }
  }
  return std::nullopt;
}

}  // namespace

std::string to_string(const ModelSizes& sizes) {
  return fmt::format("N={} K={} D={}", sizes.heads, sizes.kv_heads, sizes.head_dim);
}

ModelLayer read_model_config(std::string_view text, const std::string& source,
                             std::optional<std::int64_t> layer) {
  const Config config(parse(text, source), source);
  if (config.find("kv_lora_rank")) {
    config.fail("has latent attention (kv_lora_rank), whose sizes per head it does not state");
  }
  if (config.find("global_head_dim")) {
    config.fail("has global_head_dim: layers whose heads have sizes of their own are not known");
  }
  ModelLayer result;
  result.sizes = sizes_of(config);
  for (const char* key : {"torch_dtype", "dtype"}) {
    const std::string name = config.text(key);
    if (name.empty() || name == "auto") continue;
    try {
      result.dtype = parse_dtype(name);
    } catch (const ArgumentError& error) {
      config.fail(fmt::format("{} = {}, expected {}", key, error.value(), error.expected()));
    }
  }
  result.causal = is_causal(config);
  set_kind(result, config, kind_of(config, layer));
  result.soft_cap = config.positive("attn_logit_softcapping");
  if (const auto scalar = config.positive("query_pre_attn_scalar")) {
    result.scale = 1 / std::sqrt(*scalar);
  } else {
    result.scale = config.positive("attention_multiplier");
  }
  result.has_sinks = config.text("model_type") == "gpt_oss";
  return result;
}

}  // namespace annulus::launcher
