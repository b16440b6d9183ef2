#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>

#include <annulus/core/division.hpp>

namespace annulus {

/// Row buffers start at, and are padded to, a multiple of this many elements.
inline constexpr std::int64_t kRowAlignment = 32;

constexpr std::int64_t round_up_to_row_alignment(std::int64_t count) {
  return round_up(count, kRowAlignment);
}

/// Softmax over the part of a row seen so far: its largest logit, and Σ exp(logit − max). The
/// logit is exact, but means nothing once the sum is NaN.
struct RowSoftmax {
  float max = -std::numeric_limits<float>::infinity();
  double sum = 0;     // float64, so that it does not lose terms over many tiles
  bool sees = false;  // any key at all; the caller's to set while the sum is 0
};

/// The destination of a row's weights: `floats`, which may be the logits, or the `parts` that are
/// not null. One, two or three parts hold 8, 16 or all 24 bits of a weight as a sum of bfloat16
/// values; each part is the rounded remainder of the parts before it.
struct WeightRow {
  float* floats = nullptr;
  std::array<std::uint16_t*, 3> parts{};

  [[nodiscard]] WeightRow from(std::int64_t column) const;
};

/// logits[i] = cap · tanh(scale · logits[i] / cap), with a relative error of 4e-7 if `exact` or
/// the cap is above 50, else 2e-5. The padding is overwritten too. Returns the largest of them.
float cap_row(float* logits, std::int64_t count, float scale, float cap, bool exact);

/// to[i] = factor · from[i]; both may be the same.
void scale_row(const float* from, std::int64_t count, float factor, float* to);

/// Adds the next `count` logits of a row, each times `scale` > 0, to `row`, and writes exp(scale ·
/// logit − row.max) to `weights`. Logits outside [begin, end) count as −∞. While all logits are −∞,
/// the row's sum stays 0. The padding is overwritten too. Returns the factor for earlier weights,
/// exp(old max − new max). A logit of NaN or +∞ (from the input, or a product beyond float32) makes
/// the row's sum NaN for good. Fetches the second half of `next`, which has as many values as
/// [begin, end), and the first half too unless the caller knows `largest`, the largest of the
/// logits in [begin, end).
[[nodiscard]] float softmax_row(float* logits, std::int64_t count, std::int64_t begin,
                                std::int64_t end, float scale, const WeightRow& weights,
                                RowSoftmax& row, const float* next,
                                std::optional<float> largest = {});

}  // namespace annulus
