#pragma once

#include <cstdint>

namespace annulus {

/// Multiplies `count` logits by `factor` and adds a row of a bias, whose entries are `stride`
/// apart. Where the bias is −∞ the logit becomes −∞, even if it was NaN or ∞. Returns whether the
/// bias leaves any pair visible.
[[nodiscard]] bool add_bias_row(const float* bias, std::int64_t stride, std::int64_t count,
                                float factor, float* logits);

/// Sets logits to −∞ where a row of a dense mask is 0. Returns whether it leaves any pair visible.
[[nodiscard]] bool hide_row(const std::uint8_t* mask, std::int64_t stride, std::int64_t count,
                            float* logits);

/// Whether a row of a bias or of a dense mask leaves any of `count` pairs visible.
[[nodiscard]] bool shows_any(const float* bias, std::int64_t stride, std::int64_t count);
[[nodiscard]] bool shows_any(const std::uint8_t* mask, std::int64_t stride, std::int64_t count);

}  // namespace annulus
