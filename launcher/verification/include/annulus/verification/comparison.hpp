#pragma once

#include <annulus/attention/accuracy.hpp>
#include <annulus/attention/oracle.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/control.hpp>

namespace annulus::verification {

/// The deviation of some rows from the truth, as sums over rows that can be added over ranks.
struct Deviation {
  double difference = 0;  ///< Σ (output − oracle)²
  double reference = 0;   ///< Σ oracle²
  double lse = 0;         ///< the largest |LSE − oracle's|; likewise of a maximum
  /// The largest error of a row's output, LSE or maximum, as a share of its bound (see
  /// row_bound()).
  double row_share = 0;
  double lse_share = 0;
  /// The number of rows whose output is not 0. Other rows see no key and are exact.
  double rows = 0;

  void add(const Deviation& other);
};

/// Compares output [b,t,n,Dv] and LSE [b,n,t], float32, with the oracle's of the same rows of
/// `problem`. A row that sees nothing must be exactly (0, −∞), and only such a row, or one whose
/// logits are all −∞, may have that LSE. Where the oracle has NaN there must be NaN; where its
/// output has an infinity there must be that infinity or NaN. These entries do not count in the
/// sums. If any of this fails, the deviation is infinite, or NaN if there is NaN where the oracle
/// has none. Throws InternalError when the shapes do not fit.
[[nodiscard]] Deviation compare(const AttentionProblem& problem, const OracleOutput& truth,
                                const ConstTensorView& output, const ConstTensorView& lse);
/// The same for an unnormalised output with maximum and sum [b,n,t], float32: output / sum is
/// compared with the output of `truth`, which is normalised, and maximum + log(sum) with its LSE. A
/// row that sees nothing must be exactly (0, −∞, 0).
[[nodiscard]] Deviation compare(const AttentionProblem& problem, const OracleOutput& truth,
                                const ConstTensorView& output, const ConstTensorView& maximum,
                                const ConstTensorView& sum);

/// The errors of docs/semantics.md §6.
struct Accuracy {
  double output = 0;     ///< relative Frobenius error; 0 if both are zero
  double lse = 0;        ///< largest absolute error; of the maximum too, if there is one
  double row_share = 0;  ///< see Deviation
  double lse_share = 0;
  double rows = 0;  ///< likewise; every copy of a row counts

  /// NaN is never within a bound.
  [[nodiscard]] bool within(const AccuracyBound& bound) const {
    return output <= bound.output && row_share <= 1 && lse_share <= 1;
  }
};

/// The errors of all ranks together. Collective over the group.
[[nodiscard]] Accuracy accuracy(const Deviation& local, Control& group);

}  // namespace annulus::verification
