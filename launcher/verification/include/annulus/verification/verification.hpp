#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <annulus/attention/oracle_gradients.hpp>
#include <annulus/attention/problem.hpp>
#include <annulus/attention/registry.hpp>
#include <annulus/attention/score_tensors.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/sharded_operands.hpp>
#include <annulus/verification/comparison.hpp>
#include <annulus/verification/gradient_verification.hpp>
#include <annulus/verification/random_scores.hpp>
#include <annulus/verification/random_tensor.hpp>

namespace annulus::verification {

/// The backward pass of a case, and how to compute it.
struct BackwardCase {
  std::string implementation = {};  ///< empty: the forward pass's, or "auto"
  std::string schedule = {};        ///< likewise
  ring::BackwardRequest request = {};
  DType grad_wire = DType::float32;  ///< see ring::PlanOptions::grad_wire
  /// True if the case passes when no implementation computes the gradients.
  bool may_be_refused = false;
  /// Keeps the oracle's gradients for other cases of the same problem, request, seed and fills on
  /// as many ranks: filled in by the first one. Null: they are computed for this case alone.
  std::shared_ptr<std::optional<OracleGradients>> truth = {};
};

/// How the values that AttentionProblem::call_arguments names come with the calls of a case.
struct CalledCase {
  bool sinks = false;             ///< sinks come with the calls too
  bool in_device_memory = false;  ///< of lengths, offsets and seed; sinks always are
};

/// A problem on random tensors, and how to compute it; the context is passed separately.
struct ShardedCase {
  AttentionProblem problem;
  ring::OperandLayout layout;
  std::string schedule = "auto";
  /// The drawn options; by default the library's. On a device, blocks are cut and partial results
  /// bounded either way.
  std::optional<ring::PlanOptions> plan;
  std::string implementation = "auto";
  std::uint64_t seed = 0;  ///< of the tensors
  OperandFills fills = {};
  Transport transport = Transport::automatic;  ///< automatic: the context's
  std::optional<ring::CostModel> cost_model;   ///< by default the library's
  ring::TuningOptions tuning = {};             ///< of the sharded run; the unsharded one follows it
  std::optional<BackwardCase> backward = {};   ///< gradients are computed and verified too
  CalledCase called = {};  ///< the problem's call arguments come with every call
};

/// A random tensor of the seed, or a part of it: its entries at `index` (positions per dimension).
[[nodiscard]] Tensor random_part(const std::vector<PositionRanges>& index,
                                 const Extents& global_shape, DType dtype, std::uint64_t seed,
                                 Operand operand, MemoryPool& memory, int threads = 1);

/// The shards that one rank holds of a case: random operands, and the results to be computed.
struct CaseShards {
  CaseShards(const ring::ShardedOperands& operands, DType dtype, std::uint64_t seed, int rank,
             MemoryPool& memory, int threads = 1, const OperandFills& fills = {},
             bool normalize_output = true);
  [[nodiscard]] ring::LocalTensors local_tensors() const;
  /// Bias and dense mask, of `kv_length` keys.
  [[nodiscard]] ScoreTensors scores(std::int64_t kv_length) const;

  /// Output with LSE or, if unnormalised, with maximum and sum.
  [[nodiscard]] std::vector<const Tensor*> results() const;
  /// The deviation of the results from a normalised oracle's.
  [[nodiscard]] Deviation deviation_from(const AttentionProblem& problem,
                                         const OracleOutput& truth) const;

  /// True if all queries, keys and values are finite.
  [[nodiscard]] bool all_finite() const;

  Tensor query, key, value, output;
  Tensor lse, maximum, sum;  ///< without dimensions if not wanted
  Tensor bias, mask;         ///< [b,n,t,S], 1 where broadcast; without dimensions if there is none
};

/// Called to report progress: the phase ("oracle"), and how much of it is done, of how much; 0 of 0
/// if unknown.
using Phase = std::function<void(const char* what, double done, double total)>;

/// The findings of verify_sharded(), the same on every rank.
struct Verification : PassFindings {
  std::string transport;
  AccuracyBound bound;
  Accuracy sharded;
  /// The accuracy of the same implementation, given all keys at once. If the problem asks for the
  /// same bits on any number of ranks, bits are compared instead, and this equals `sharded`.
  Accuracy unsharded;
  /// The largest error allowed relative to the unsharded run. None for float64, whose errors are as
  /// small as the oracle's own, and none on a GPU if some inputs are not finite, since flash
  /// kernels then recompute some tiles more exactly.
  std::optional<double> allowance = {};
  std::optional<GradientVerification> gradients = {};  ///< if the case has a backward pass

  /// The error over that of the unsharded run; 1 if both are 0, nothing if they are not compared.
  [[nodiscard]] std::optional<double> ratio() const;
  /// The first error that is too large, and bits that differ, gradients included; empty if nothing
  /// is wrong.
  [[nodiscard]] std::vector<Failure> failures() const;
  /// Their texts, separated by "; ".
  [[nodiscard]] std::string failure() const;
};

/// Runs the case sharded, twice, and compares every rank's output with the oracle's. Before each
/// run, another call uses other keys and values, and other lengths, offsets, seeds and sinks if
/// these come with the calls. If ranks hold copies of the same rows, every copy counts. Nothing is
/// gathered: each rank makes the keys and values that it needs. Collective over the context; throws
/// alike on all ranks, except for a failing transport (see Runner::submit).
///
/// The sharded error may be up to sharded_error_factor() times the error of the unsharded run plus
/// what sharding adds, summed in squares as for independent errors. Sharding adds three unit
/// roundoffs of float32 for each merge of key/value shards (at least one, as blocks may be cut
/// differently), for its weight, product and sum. Without them the comparison would be a matter of
/// luck where errors are a few roundings. If a kernel rounds partial results to the problem's dtype
/// (as cuDNN always does), that rounding is added too.
///
/// A backward pass is run twice from results of the sharded forward pass. Its gradients are
/// compared with the oracle's of the whole problem, which every rank makes: see docs/semantics.md
/// §6, and verify_gradients(). Throws ArgumentError for a problem that is too large for this
/// (kMaxGradientEntries). The errors are compared likewise with the errors of an unsharded backward
/// pass after an unsharded forward pass.
[[nodiscard]] Verification verify_sharded(const ShardedCase& sharded_case, Context& context,
                                          const Phase& phase = {});

}  // namespace annulus::verification
