#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <annulus/core/dtype.hpp>

namespace annulus::launcher {

/// The largest number of a layer.
inline constexpr std::int64_t kMaximumLayers = 1 << 16;

/// Query heads N, key/value heads K and head dimension D of a model.
struct ModelSizes {
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;

  bool operator==(const ModelSizes&) const = default;
};

/// "N=64 K=8 D=128".
[[nodiscard]] std::string to_string(const ModelSizes& sizes);

/// The keys that a row of a sliding layer sees beside its own.
struct ModelWindow {
  std::int64_t left = 0;         ///< the L of --window L,0, with --causal
  std::int64_t either_side = 0;  ///< both numbers of --window, without --causal

  bool operator==(const ModelWindow&) const = default;
};

/// The attention of one layer of a model, as far as the configuration says.
struct ModelLayer {
  ModelSizes sizes;
  std::optional<DType> dtype;
  std::optional<bool> causal;  ///< absent if the configuration does not say
  std::optional<ModelWindow> window;
  std::optional<std::int64_t> chunk;
  std::optional<double> scale;
  std::optional<double> soft_cap;
  bool has_sinks = false;  ///< one for each head, among the weights of the model
};

/// Reads a config.json of Hugging Face's transformers: num_attention_heads, num_key_value_heads,
/// head_dim, hidden_size, sliding_window with layer_types (or sliding_window_pattern,
/// use_sliding_window, max_window_layers), attention_chunk_size with layer_types (or
/// no_rope_layers, no_rope_layer_interval), use_bidirectional_attention, is_causal, architectures,
/// attn_logit_softcapping, query_pre_attn_scalar, attention_multiplier, dtype (torch_dtype). If
/// there is a text_config, its keys are read. Other keys are ignored, as they are not about
/// attention. Windows and chunks have the same meaning as in annulus.hf.
///
/// `layer` counts from 0; if it is absent, all layers must be alike. `source` names the text in
/// messages. Throws FileError(source, …) if the text is no such configuration, or if its attention
/// is not softmax attention over keys and values (for example, latent or linear attention). Throws
/// ArgumentError("layer", …) if `layer` is needed or out of range.
[[nodiscard]] ModelLayer read_model_config(std::string_view text, const std::string& source,
                                           std::optional<std::int64_t> layer);

}  // namespace annulus::launcher
