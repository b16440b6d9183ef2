#pragma once

#include <cstdint>
#include <limits>

namespace annulus {

/// The logits of a row that are left after some were hidden.
struct SeenLogits {
  bool any = false;  ///< some pair is visible
  float largest = -std::numeric_limits<float>::infinity();
};

/// Multiplies `count` logits by `factor` and adds a row of a bias, whose entries are `stride`
/// apart. Where the bias is −∞ the logit becomes −∞, even if it was NaN or ∞. Fetches the first
/// half of `next`, which holds `count` values of the row that comes next.
[[nodiscard]] SeenLogits add_bias_row(const float* bias, std::int64_t stride, std::int64_t count,
                                      float factor, float* logits, const float* next);

/// Sets logits to −∞ where a row of a dense mask is 0.
[[nodiscard]] SeenLogits hide_row(const std::uint8_t* mask, std::int64_t stride, std::int64_t count,
                                  float* logits);

/// Sets logits to −∞ where the id of the column is not `wanted`.
[[nodiscard]] SeenLogits hide_other_ids(const std::int32_t* ids, std::int64_t stride,
                                        std::int64_t count, std::int32_t wanted, float* logits);

/// The columns that rows of a dense mask show.
struct ShownColumns {
  std::int64_t begin = 0;  ///< no row shows a column outside [begin, end)
  std::int64_t end = 0;
  bool all = false;  ///< every pair is visible
  [[nodiscard]] bool empty() const { return begin >= end; }
};

/// Finds them among `count` columns, whose entries lie side by side.
[[nodiscard]] ShownColumns shown_columns(const std::uint8_t* mask, std::int64_t row_stride,
                                         std::int64_t rows, std::int64_t count);

/// True if a row of a bias or of a dense mask leaves any of `count` pairs visible.
[[nodiscard]] bool shows_any(const float* bias, std::int64_t stride, std::int64_t count);
[[nodiscard]] bool shows_any(const std::uint8_t* mask, std::int64_t stride, std::int64_t count);

}  // namespace annulus
