#pragma once

#include <cstdint>
#include <limits>

namespace annulus {

/// Row buffers start at a multiple of this many floats and are padded to one.
inline constexpr std::int64_t kRowAlignment = 16;

/// Softmax over the part of a row seen so far: its largest logit, and Σ exp(logit − max).
struct RowSoftmax {
  float max = -std::numeric_limits<float>::infinity();
  double sum = 0;     // float64, so that it does not lose terms over many tiles
  bool sees = false;  // any key at all; the caller's to set while the sum is 0
};

/// logits[i] = cap · tanh(logits[i] / cap).
void cap_row(float* logits, std::int64_t count, float cap);

/// Adds the next `count` logits of a row to `row` and overwrites them with exp(logit − row.max).
/// Those outside [begin, end) count as −∞. While all logits are −∞, the row's sum stays 0. The
/// padding is overwritten too. Returns what earlier weights must be multiplied by: exp(old max −
/// new max). A logit of NaN or +∞ (an input that was so, or a product beyond float32) makes the
/// row's sum NaN for good.
[[nodiscard]] float softmax_row(float* logits, std::int64_t count, std::int64_t begin,
                                std::int64_t end, RowSoftmax& row);

}  // namespace annulus
