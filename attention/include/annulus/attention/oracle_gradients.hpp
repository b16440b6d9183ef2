#pragma once

#include <cstdint>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/attention/score_tensors.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus {

/// One gradient, row-major.
struct OracleGradient {
  std::vector<double> values;
  /// Sums of magnitudes, to which the bound of docs/semantics.md §6 is relative: the same formula
  /// with P ∘ (|dP| + |delta|) in place of dL and absolute values of the other factor.
  std::vector<double> magnitudes;
};

/// The gradients of a loss by everything that oracle_attention() reads. It covers the call's rows.
struct OracleGradients {
  OracleGradient query;  ///< [B, rows, N, D]
  OracleGradient key;    ///< [B, columns, K, D], from these rows; several calls can be added
  OracleGradient value;  ///< [B, columns, K, Dv], likewise
  /// As broadcast: 1 where the problem's bias is 1, and [B, N, rows, S] elsewhere (columns instead
  /// of S where scores are by column); empty without a bias.
  OracleGradient bias;
  OracleGradient sinks;  ///< [N, M], or [M] where all heads share them; empty without sinks
  /// By sink, Σ (P · ‖dO ∘ O‖)² over the rows. Roundings of O are independent, so they reach the
  /// sinks' gradient with the root of this sum, whereas `magnitudes` grow with the number of rows.
  std::vector<double> sink_squares;
  /// By entry of the bias, Σ m² over the rows, where m is a row's part of the entry's magnitude.
  /// Roundings of different rows are independent too.
  std::vector<double> bias_squares;
};

/// Sequential, float64, one row at a time (docs/semantics.md §1, "Gradients"; FlashAttention-2, Dao
/// 2023, §3.1). With P = exp(logit − LSE), Z the factors of dropout (0 or 1/(1 − p)) and delta =
/// rowsum(dO ∘ O) − dLSE:
///
///     dV = (P ∘ Z)ᵀ dO      dP = (dO Vᵀ) ∘ Z      dL = P ∘ (dP − delta)      dbias = dL
///     dS = dL ∘ (1 − (capped/cap)²)      dQ = scale · dS K      dK = scale · dSᵀ Q
///     dsinks = −Σ exp(sink − LSE) · delta
///
/// Gradients are summed over grouped heads and over broadcast dimensions of bias and sinks. A row
/// whose LSE is −∞ adds nothing.
///
/// The arguments are as for oracle_attention(); key and value hold all columns that the rows see.
/// grad_output [b,rows,n,Dv] is dO, of the problem's dtype; grad_lse [b,n,rows] is dLSE, float32 or
/// float64, or has no dimensions: then it is 0. Throws ArgumentError for an unnormalised output and
/// for attention weights, which have no gradients, and InternalError for other shapes.
[[nodiscard]] OracleGradients oracle_gradients(
    const AttentionProblem& problem, const ConstTensorView& query, const ConstTensorView& key,
    const ConstTensorView& value, const ConstTensorView& grad_output,
    const ConstTensorView& grad_lse, const PositionRanges& rows, std::int64_t first_batch = 0,
    std::int64_t first_head = 0, std::int64_t first_column = 0, const ScoreTensors& scores = {});

}  // namespace annulus
