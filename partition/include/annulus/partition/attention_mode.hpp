#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace annulus {

/// The kind of work that an attention call is part of. Sharding rules may differ between modes.
enum class AttentionMode : std::uint8_t { train, prefill, autoregressive, insert };

inline constexpr std::array kAttentionModes{AttentionMode::train, AttentionMode::prefill,
                                            AttentionMode::autoregressive, AttentionMode::insert};

[[nodiscard]] std::string_view name_of(AttentionMode mode) noexcept;
/// Throws ArgumentError("mode", …).
[[nodiscard]] AttentionMode parse_attention_mode(std::string_view name);
/// The mode of a call that does not name one: autoregressive if `query_length` is 1, else train.
[[nodiscard]] AttentionMode infer_attention_mode(std::int64_t query_length) noexcept;

}  // namespace annulus
