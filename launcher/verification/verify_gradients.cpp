#include "verify_gradients.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <annulus/attention/accuracy.hpp>
#include <annulus/core/error.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/sharded_attention.hpp>
#include <annulus/verification/gradient_shards.hpp>

#include "entries.hpp"
#include "whole_gradients.hpp"

namespace annulus::verification {
namespace {

// The case with whole sequences on every rank.
ShardedCase unsharded_case(const ShardedCase& with_all_columns, Place place) {
  ShardedCase whole = with_all_columns;
  if (!whole.plan) whole.plan = ring::PlanOptions::for_place(place);
  const PartitionSpec& query = with_all_columns.layout.query;
  whole.layout.query = PartitionSpec({query[0], {}, query[2], query[3]});
  whole.backward->schedule = "local";
  whole.backward->grad_wire = DType::float32;
  return whole;
}

// A run of the case on whole sequences, with gradients by the chosen implementation if it was a
// single one. The rounding of outputs and LSE reaches the gradients, so the forward pass stays that
// of the sharded run. If the chosen implementation cannot compute whole sequences, it is only
// preferred, in both passes, and others compute the rest.
std::unique_ptr<ForwardRun> prepared_run(ShardedCase whole, const std::string& chosen,
                                         Context& context) {
  const std::vector<std::string> names = context.registry().names();
  if (std::ranges::find(names, chosen) != names.end()) {
    ShardedCase named = whole;
    named.backward->implementation = chosen;
    auto run = std::make_unique<ForwardRun>(named, context);
    try {
      run->attention.prepare_backward(named.backward->request);
      return run;
    } catch (const UserError&) {  // the same on all ranks
    }
  }
  whole.plan->preferred = chosen;  // "native+vanilla" prefers none
  return std::make_unique<ForwardRun>(whole, context);
}

// The errors of the unsharded backward pass. Sets `reproduces` to false if its bits differ from the
// sharded one's and the problem asks for equal bits.
GradientErrors unsharded_errors(const ShardedCase& whole, const std::string& chosen,
                                const OracleGradients& truth, Context& context,
                                const GradientShards& sharded, bool& reproduces) {
  const std::unique_ptr<ForwardRun> forward = prepared_run(whole, chosen, context);
  forward->run();
  GradientShards gradients(forward->attention.operands(), whole.problem, whole.backward->request,
                           whole.seed, context);
  gradients.compute(forward->attention, forward->tensors());
  const bool differs = whole.problem.in_global_order() && !sharded.are_parts_of(gradients);
  Control& world = context.mesh().world();
  reproduces = !on_any_rank(world, differs, "comparison with an unsharded backward pass");
  return gradients.errors(truth, world);
}

// Part of all errors of planner and registry that say that no implementation can compute something.
constexpr const char* kRefusal = "no implementation can";

// True if the rank merges partial results of rows: a reduction of several, or a kernel that
// continues another's.
bool merges(const ring::RankPlan& plan) {
  const auto reductions = plan.all<ring::Reduce>();
  const auto blocks = plan.all<ring::Block>();
  return std::any_of(reductions.begin(), reductions.end(),
                     [](const ring::Reduce* reduce) {
                       return reduce->reduction == ring::Reduction::softmax &&
                              reduce->parts.size() > 1;
                     }) ||
         std::any_of(blocks.begin(), blocks.end(),
                     [](const ring::Block* block) { return block->state.has_value(); });
}

// True if the backward pass has a tile that the forward pass did not compute as a whole. Logits
// then differ, since sums of products are rounded in another order in tiles of other sizes.
bool cuts_otherwise(const ring::RankPlan& forward, const ring::RankPlan& backward) {
  const std::vector<const ring::Tile*> tiles = forward.tiles();
  return std::ranges::any_of(backward.tiles(), [&](const ring::Tile* tile) {
    return std::ranges::none_of(tiles, [&](const ring::Tile* other) {
      return other->row_positions == tile->row_positions &&
             other->column_positions == tile->column_positions &&
             other->heads.count == tile->heads.count && other->batches.count == tile->batches.count;
    });
  });
}

// The root mean square of the finite numbers of a tensor.
double root_mean_square(const Tensor& tensor) {
  double sum = 0;
  std::int64_t count = 0;
  for (const double number : numbers_of(tensor)) {
    if (!std::isfinite(number)) continue;
    sum += number * number;
    ++count;
  }
  return count == 0 ? 0 : std::sqrt(sum / static_cast<double>(count));
}

// The root mean square of the norms of [b,t,n,D] vectors, over finite entries.
double norm_of(const Tensor& vectors) {
  return root_mean_square(vectors) * std::sqrt(static_cast<double>(vectors.shape()[3]));
}

// The errors of weights, in float32 roundings, from merging partial results of the forward pass and
// from computing logits in other tiles. Merging rounds the LSE, and weights are exp(logit − LSE),
// so the rounding appears in weights, |LSE| times as large. A product q·k is off by scale · ‖q‖‖k‖
// / √6 roundings if its terms are added one after the other. If both passes compute the same tiles,
// this cancels in logit − LSE for rows that see few keys.
double roundings_of_weights(const ShardedCase& sharded_case, const ring::RankPlan& forward,
                            const ring::RankPlan& backward, const CaseShards& shards,
                            Control& world) {
  const std::vector<double> most =
      world.max(std::vector{merges(forward) ? root_mean_square(shards.lse) : 0.0,
                            cuts_otherwise(forward, backward) ? 1.0 : 0.0, norm_of(shards.query),
                            norm_of(shards.key)},
                "sizes of LSE and logits");
  const double scale = std::abs(sharded_case.problem.logit_scale());
  return 3 + most[0] + most[1] * scale * most[2] * most[3] / std::sqrt(3.0);
}

// The number of rows of a gradient with an entry other than 0. Other rows are exact.
std::int64_t rows_of(const OracleGradient& gradient, std::int64_t width) {
  std::int64_t rows = 0;
  const std::vector<double>& all = gradient.magnitudes;
  for (auto row = all.begin(); row != all.end(); row += width) {
    rows += std::any_of(row, row + width, [](double magnitude) { return magnitude != 0; }) ? 1 : 0;
  }
  return rows;
}

// See verify_sharded().
GradientErrors allowed_errors(const AttentionProblem& problem, const OracleGradients& truth,
                              const GradientErrors& unsharded, int shards, double rounding,
                              double wire, double merge) {
  constexpr double kAny = std::numeric_limits<double>::infinity();
  const AttentionShape& shape = problem.shape;
  const bool compares_bias = problem.bias && (*problem.bias)[2] > 1 && (*problem.bias)[3] > 1;
  const double of_columns = std::hypot(rounding, wire);
  const auto allowed = [&](const OracleGradient& gradient, std::int64_t width, double error,
                           double rounded) {
    return allowed_error(rows_of(gradient, width), error, shards, rounded, merge);
  };
  return {allowed(truth.query, shape.head_dim, unsharded[0], rounding),
          allowed(truth.key, shape.head_dim, unsharded[1], of_columns),
          allowed(truth.value, shape.value_dim, unsharded[2], of_columns), kAny,
          compares_bias ? allowed(truth.bias, (*problem.bias)[3], unsharded[4], rounding) : kAny};
}

}  // namespace

GradientVerification verify_gradients(const ShardedCase& sharded_case,
                                      const ShardedCase& with_all_columns, ForwardRun& forward,
                                      bool rounded, Context& context, const Phase& phase) {
  const AttentionProblem& problem = sharded_case.problem;
  const auto tell = [&](const char* what) {
    if (phase) phase(what, 0, 0);
  };
  Control& world = context.mesh().world();
  Attention& attention = forward.attention;
  const ring::ShardedOperands& operands = attention.operands();
  GradientVerification result;
  result.request = sharded_case.backward->request;
  tell("backward passes");
  try {
    attention.prepare_backward(result.request);
  } catch (const UserError& error) {  // the same on all ranks
    result.refusal = error.what();
    const bool refused = result.refusal.find(kRefusal) != std::string::npos;
    if (!sharded_case.backward->may_be_refused || !refused) throw;
    return result;
  }
  const ring::ShardedAttention& pass = *attention.backward_pass(result.request);
  GradientShards gradients(operands, problem, result.request, sharded_case.seed, context);
  const ring::LocalTensors tensors = forward.tensors();
  const ring::LocalTensors others = forward.with(forward.called.others());
  if (forward.called.any()) gradients.compute_others(attention, others);
  gradients.compute(attention, tensors, kNanBytes);
  const std::vector<std::vector<std::byte>> first = gradients.bytes();
  gradients.compute_others(attention, others);
  gradients.compute(attention, tensors, kOtherBytes);
  const bool repeats = !problem.repeats_bits(context.place()) || gradients.bytes() == first;

  std::optional<OracleGradients> own;
  std::optional<OracleGradients>& kept =
      sharded_case.backward->truth ? *sharded_case.backward->truth : own;
  if (!kept) kept = whole_gradients(sharded_case, world, context.threads(), phase);
  const OracleGradients& truth = *kept;
  result.sharded = gradients.errors(truth, world);
  tell("unsharded backward pass");
  result.decision = pass.decision();
  result.schedule = pass.schedule();
  result.selection = pass.selection();
  result.prices = pass.plan_input().prices;
  result.implementations = pass.implementations_of_ranks();
  result.unsharded =
      unsharded_errors(unsharded_case(with_all_columns, context.place()), result.implementations,
                       truth, context, gradients, result.reproduces);
  result.reduces_rounded = on_any_rank(world, pass.reduces_rounded(), "rounding of gradients");
  const bool wide = problem.dtype == DType::float64;
  const DType judged = wide ? DType::float32 : problem.dtype;
  result.adds_rounded = on_any_rank(world, pass.adds_rounded_gradients(), "rounding of parts");
  const double wire = result.adds_rounded ? unit_roundoff(DType::bfloat16) : 0;
  result.bound =
      std::hypot(2 * accuracy_bound(judged, problem.shape.kv_length).output, wire / std::sqrt(3.0));
  if (!wide) {
    result.allowance =
        allowed_errors(problem, truth, result.unsharded,
                       std::max(operands.query.shards(1), operands.key.shards(1)),
                       rounded || result.reduces_rounded ? unit_roundoff(problem.dtype) : 0, wire,
                       roundings_of_weights(sharded_case, attention.rank_plan(), pass.rank_plan(),
                                            forward.shards, world));
  }
  result.repeats = !on_any_rank(world, !repeats, "comparison of two backward passes");
  return result;
}

}  // namespace annulus::verification
