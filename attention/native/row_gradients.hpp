#pragma once

#include <cstdint>

namespace annulus {

/// The numbers that turn the logits of a row into gradients. Arrays by column are whole vectors
/// (kRowAlignment).
struct RowGradient {
  float lse = 0;    ///< not −∞
  float delta = 0;  ///< rowsum(dO ∘ O) − dLSE
  float scale = 1;  ///< derivative of a logit by q·k, unless there are `slopes` by column
  const float* slopes = nullptr;
  const float* keep = nullptr;  ///< dropout's factors by column; null: all are 1
  bool hides = false;           ///< logits of −∞ may belong to hidden pairs
};

/// slopes[i] = scale / cosh²(logits[i] / cap), the derivative of a capped logit by q·k, precise
/// also where it is small. The padding is overwritten too.
void slopes_of_cap(const float* logits, std::int64_t count, float scale, float cap, float* slopes);

/// Replaces `count` logits by weights P ∘ keep with P = exp(logit − LSE), and the entries of dO Vᵀ
/// in `grads` by the gradients of q·k, slope · dL with dL = P ∘ (keep ∘ dO Vᵀ − delta); writes dL
/// to `grad_logits` unless that is null. A hidden pair gets zeros. The padding is overwritten too.
void gradient_row(const RowGradient& row, std::int64_t count, float* logits, float* grads,
                  float* grad_logits);

}  // namespace annulus
