#pragma once

#include <cstdint>
#include <limits>

namespace annulus {

/// What a row of logits has left after some were hidden.
struct SeenLogits {
  bool any = false;  ///< some pair is visible
  float largest = -std::numeric_limits<float>::infinity();
};

/// Multiplies `count` logits by `factor` and adds a row of a bias, whose entries are `stride`
/// apart. Where the bias is −∞ the logit becomes −∞, even if it was NaN or ∞.
[[nodiscard]] SeenLogits add_bias_row(const float* bias, std::int64_t stride, std::int64_t count,
                                      float factor, float* logits);

/// Sets logits to −∞ where a row of a dense mask is 0.
[[nodiscard]] SeenLogits hide_row(const std::uint8_t* mask, std::int64_t stride, std::int64_t count,
                                  float* logits);

/// Sets logits to −∞ where the id of the column is not `wanted`.
[[nodiscard]] SeenLogits hide_other_ids(const std::int32_t* ids, std::int64_t stride,
                                        std::int64_t count, std::int32_t wanted, float* logits);

/// Whether a row of a bias or of a dense mask leaves any of `count` pairs visible.
[[nodiscard]] bool shows_any(const float* bias, std::int64_t stride, std::int64_t count);
[[nodiscard]] bool shows_any(const std::uint8_t* mask, std::int64_t stride, std::int64_t count);

}  // namespace annulus
