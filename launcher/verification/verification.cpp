#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/oracle.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/sharded_attention.hpp>
#include <annulus/verification/filled_part.hpp>
#include <annulus/verification/for_tensor.hpp>
#include <annulus/verification/verification.hpp>

#include "entries.hpp"
#include "forward_run.hpp"
#include "verify_gradients.hpp"
#include "whole_gradients.hpp"

namespace annulus::verification {
namespace {

using Index = std::vector<PositionRanges>;

std::vector<std::vector<std::byte>> bytes_of_results(const CaseShards& shards) {
  std::vector<std::vector<std::byte>> all;
  for (const Tensor* result : shards.results()) all.push_back(bytes_of(*result));
  return all;
}

std::int64_t first_of(const PositionRanges& positions) {
  return positions.empty() ? 0 : positions.global(LocalPosition(0)).value();
}

// The entries of an operand at `index`, by its fill if it has one.
Tensor operand_part(Operand operand, const FillPart& fill, const NamedSharding& sharding,
                    const Index& index, DType dtype, std::uint64_t seed, MemoryPool& memory,
                    int threads = 1) {
  const Extents& whole = sharding.global_shape();
  return filled_part(name_of(operand), index, dtype,
                     fill ? fill : random_operand(whole, seed, operand, threads), memory);
}

// All keys and values that the rows of a rank may see.
struct WholeColumns {
  WholeColumns(const ring::ShardedOperands& operands, const ShardedCase& sharded_case, int rank,
               MemoryPool& memory) {
    const auto part = [&](const NamedSharding& sharding, const FillPart& fill, Operand operand) {
      Index index = sharding.index(rank);
      index[1] = PositionRanges::all(sharding.global_shape()[1]);
      return operand_part(operand, fill, sharding, index, sharded_case.problem.dtype,
                          sharded_case.seed, memory);
    };
    key = part(operands.key, sharded_case.fills.key, Operand::key);
    value = part(operands.value, sharded_case.fills.value, Operand::value);
  }
  Tensor key, value;
};

// The oracle's output of the rank's rows, always normalised, a few rows at a time, to report
// progress.
OracleOutput oracle_of_rank(AttentionProblem problem, const ring::ShardedOperands& operands,
                            int rank, const CaseShards& shards, const WholeColumns& columns,
                            const Phase& phase) {
  constexpr std::int64_t kRows = 16;
  problem.normalize_output = true;
  const PositionRanges positions = operands.query.positions(rank, 1);
  const ConstTensorView query = shards.query.view();
  const ScoreTensors scores = shards.scores(problem.shape.kv_length);
  const Extents& shape = query.shape();  // [b,t,n,D]
  const std::int64_t rows = shape[1];
  const std::int64_t heads = shape[2];
  const std::int64_t dim = problem.shape.value_dim;
  OracleOutput whole{std::vector<double>(static_cast<std::size_t>(shape[0] * rows * heads * dim)),
                     std::vector<double>(static_cast<std::size_t>(shape[0] * heads * rows))};
  whole.maximum.resize(whole.lse.size());
  whole.terms.resize(whole.lse.size());
  for (std::int64_t begin = 0; begin < rows; begin += kRows) {
    if (phase) phase("oracle", static_cast<double>(begin), static_cast<double>(rows));
    const std::int64_t count = std::min(kRows, rows - begin);
    const OracleOutput part = oracle_attention(
        problem, query.slice(1, begin, count), columns.key.view(), columns.value.view(),
        positions.slice({LocalPosition(begin), count}), first_of(operands.query.positions(rank, 0)),
        first_of(operands.query.positions(rank, 2)), 0, scores.slice(2, begin, count));
    for (std::int64_t b = 0; b < shape[0]; ++b) {
      std::copy_n(part.output.data() + b * count * heads * dim, count * heads * dim,
                  whole.output.data() + (b * rows + begin) * heads * dim);
      for (std::int64_t n = 0; n < heads; ++n) {
        const auto place = [&](const auto& from, auto& to) {
          std::copy_n(from.data() + (b * heads + n) * count, count,
                      to.data() + (b * heads + n) * rows + begin);
        };
        place(part.lse, whole.lse);
        place(part.maximum, whole.maximum);
        place(part.terms, whole.terms);
      }
    }
  }
  return whole;
}

// The same case, computed by the chosen implementation with all keys and values on every rank; if
// bits are compared, with the whole problem on every rank. An implementation name that implies a
// schedule becomes `auto`.
ShardedCase unsharded_case(const ShardedCase& sharded_case, const Selection& selection,
                           const std::string& preferred, Place place) {
  ShardedCase whole = sharded_case;
  whole.tuning = {};
  if (!preferred.empty()) {
    if (!whole.plan) whole.plan = ring::PlanOptions::for_place(place);
    whole.plan->preferred = preferred;
  }
  if (selection.schedule != "auto") whole.implementation = "auto";
  const PartitionSpec& kv = sharded_case.layout.kv;
  whole.layout.kv = PartitionSpec({kv[0], {}, kv[2], kv[3]});
  whole.schedule = "local";
  if (sharded_case.problem.in_global_order()) {
    whole.layout.query = whole.layout.kv = PartitionSpec();
  }
  return whole;
}

// True if this rank's results have the bits of a call for the whole problem.
bool has_bits_of(const CaseShards& shards, const ring::ShardedOperands& operands, int rank,
                 const CaseShards& whole) {
  const std::vector<const Tensor*> parts = shards.results();
  const std::vector<const Tensor*> all = whole.results();
  bool same = true;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const NamedSharding& sharding = i == 0 ? operands.output : operands.lse;
    same = same && is_part_of(*parts[i], sharding, rank, *all[i]);
  }
  return same;
}

}  // namespace

Tensor random_part(const Index& index, const Extents& global_shape, DType dtype, std::uint64_t seed,
                   Operand operand, MemoryPool& memory, int threads) {
  return filled_part(name_of(operand), index, dtype,
                     random_operand(global_shape, seed, operand, threads), memory);
}

CaseShards::CaseShards(const ring::ShardedOperands& operands, DType dtype, std::uint64_t seed,
                       int rank, MemoryPool& memory, int threads, const OperandFills& fills,
                       bool normalize_output) {
  output = unfilled("output", dtype, operands.output.local_shape(rank), memory);
  const auto row_result = [&](const char* name) {
    return unfilled(name, DType::float32, operands.lse.local_shape(rank), memory);
  };
  if (normalize_output) {
    lse = row_result("LSE");
  } else {
    maximum = row_result("maximum");
    sum = row_result("sum");
  }
  const auto part = [&](const NamedSharding& sharding, const FillPart& fill, Operand operand) {
    return operand_part(operand, fill, sharding, sharding.index(rank), dtype, seed, memory,
                        threads);
  };
  query = part(operands.query, fills.query, Operand::query);
  key = part(operands.key, fills.key, Operand::key);
  value = part(operands.value, fills.value, Operand::value);
  if (operands.bias) {
    const Extents& whole = operands.bias->global_shape();
    bias = filled_part("bias", operands.bias->index(rank), DType::float32,
                       fills.bias ? fills.bias : random_bias(whole, 1, seed, threads), memory);
  }
  if (operands.dense_mask) {
    const Extents& whole = operands.dense_mask->global_shape();
    mask = filled_part("mask", operands.dense_mask->index(rank), DType::boolean,
                       fills.mask ? fills.mask : random_mask(whole, 0.75, seed), memory);
  }
}

ring::LocalTensors CaseShards::local_tensors() const {
  return {query.view(), key.view(),  value.view(),   output.view(), lse.view(),
          bias.view(),  mask.view(), maximum.view(), sum.view()};
}

std::vector<const Tensor*> CaseShards::results() const {
  if (lse.shape().rank() > 0) return {&output, &lse};
  return {&output, &maximum, &sum};
}

bool CaseShards::all_finite() const {
  for (const Tensor* tensor : {&query, &key, &value}) {
    const auto finite = [](double number) { return std::isfinite(number); };
    if (!std::ranges::all_of(numbers_of(*tensor), finite)) return false;
  }
  return true;
}

Deviation CaseShards::deviation_from(const AttentionProblem& problem,
                                     const OracleOutput& truth) const {
  if (lse.shape().rank() > 0) return compare(problem, truth, output.view(), lse.view());
  return compare(problem, truth, output.view(), maximum.view(), sum.view());
}

ScoreTensors CaseShards::scores(std::int64_t kv_length) const {
  const Extents& shape = query.shape();
  const ring::LocalTensors tensors = local_tensors();
  return broadcast_scores(tensors.bias, tensors.mask, {shape[0], shape[2], shape[1], kv_length});
}

std::optional<double> Verification::ratio() const {
  if (!allowance) return {};
  if (sharded.output == unsharded.output) return 1;
  return sharded.output / unsharded.output;
}

std::vector<Failure> Verification::failures() const {
  std::vector<Failure> all;
  if (!(sharded.output <= bound.output)) {
    all.push_back({Failure::Kind::bound,
                   fmt::format("output error {:.2e} above {:.2e}", sharded.output, bound.output)});
  } else if (!(sharded.row_share <= 1)) {
    all.push_back({Failure::Kind::bound,
                   fmt::format("output error of a row {:.2f} times its bound", sharded.row_share)});
  } else if (!(sharded.lse_share <= 1)) {
    all.push_back(
        {Failure::Kind::bound, fmt::format("LSE error {:.2e}, of a row {:.2f} times its bound",
                                           sharded.lse, sharded.lse_share)});
  } else if (allowance && !(sharded.output <= *allowance)) {
    all.push_back({Failure::Kind::ratio, fmt::format("output error {:.2e} against {:.2e} unsharded",
                                                     sharded.output, unsharded.output)});
  }
  add_differing_bits(all, "run");
  if (gradients) {
    for (Failure& failure : gradients->failures()) all.push_back(std::move(failure));
  }
  return all;
}

std::string Verification::failure() const {
  std::string text;
  for (const Failure& one : failures()) text += (text.empty() ? "" : "; ") + one.text;
  return text;
}

namespace {

// True if every kernel that this rank uses promises the same bits every time.
bool repeats_bits(const Attention& attention) {
  const ring::RankPlan& plan = attention.rank_plan();
  const std::vector<const ring::Block*> blocks = plan.all<ring::Block>();
  return std::all_of(blocks.begin(), blocks.end(), [&](const ring::Block* block) {
    const ring::BatchRange batches = plan.global(block->batches);
    return attention.forward_pass().implementation_of(*block).repeats_bits(
        {block->row_positions, block->column_positions, batches.begin, batches.count, block->full});
  });
}

}  // namespace

Verification verify_sharded(const ShardedCase& sharded_case, Context& context, const Phase& phase) {
  const AttentionProblem& problem = sharded_case.problem;
  Mesh& mesh = context.mesh();
  Device& device = context.device();
  Control& world = mesh.world();
  const int rank = mesh.rank();
  const auto tell = [&](const char* what) {
    if (phase) phase(what, 0, 0);
  };
  if (sharded_case.backward) check_gradients_fit(problem, sharded_case.backward->request);
  tell("sharded runs");
  ForwardRun sharded_run(sharded_case, context);
  const Attention& attention = sharded_run.attention;
  const ring::ShardedOperands& operands = attention.operands();
  const CaseShards& shards = sharded_run.shards;
  // No run may use results that the previous run has left, so a call with other keys, values and
  // call values comes between them.
  const auto run_others = [&] {
    const std::vector<std::byte> key = bytes_of(shards.key);
    const std::vector<std::byte> value = bytes_of(shards.value);
    std::memset(shards.key.view().data(), 0, shards.key.bytes());
    std::memset(shards.value.view().data(), 0, shards.value.bytes());
    sharded_run.run_others();
    std::copy(key.begin(), key.end(), static_cast<std::byte*>(shards.key.view().data()));
    std::copy(value.begin(), value.end(), static_cast<std::byte*>(shards.value.view().data()));
  };
  if (sharded_run.called.any()) run_others();
  sharded_run.run();
  const std::vector<std::vector<std::byte>> results = bytes_of_results(shards);
  run_others();
  sharded_run.run(kOtherBytes);
  const bool repeats = !repeats_bits(attention) || bytes_of_results(shards) == results;

  const OracleOutput truth = collectively(world, [&] {
    const Computing computing = world.computing();
    HostMemoryPool host;
    const WholeColumns columns(operands, sharded_case, rank, host);
    return oracle_of_rank(problem, operands, rank, shards, columns, phase);
  });
  const Deviation sharded = shards.deviation_from(problem, truth);
  tell("unsharded run");
  const ShardedCase with_all_columns =
      unsharded_case(sharded_case, attention.selection(),
                     attention.decision().choice.implementation, device.place());
  ForwardRun unsharded_run(with_all_columns, context);
  unsharded_run.run();
  const bool compares_bits = problem.in_global_order();
  const Deviation unsharded =
      compares_bits ? sharded : unsharded_run.shards.deviation_from(problem, truth);
  const bool reproduces =
      !compares_bits || has_bits_of(shards, operands, rank, unsharded_run.shards);

  Verification result;
  result.decision = attention.decision();
  result.schedule = attention.schedule();
  result.selection = attention.selection();
  result.prices = attention.plan_input().prices;
  result.transport = attention.transport();
  result.implementations = attention.implementations_of_ranks();
  result.bound = accuracy_bound(problem);
  result.sharded = accuracy(sharded, world);
  result.unsharded = accuracy(unsharded, world);
  result.reduces_rounded =
      on_any_rank(world, attention.reduces_rounded(), "rounding of partial results");
  const bool recomputes = !device.place().is_host() &&
                          on_any_rank(world, !shards.all_finite(), "inputs that are not finite");
  if (problem.dtype != DType::float64 && !recomputes) {
    const NamedSharding& query = operands.query;
    const int copies = mesh.size() / (query.shards(0) * query.shards(1) * query.shards(2));
    result.allowance = allowed_error(static_cast<std::int64_t>(result.sharded.rows) / copies,
                                     result.unsharded.output, operands.key.shards(1),
                                     result.reduces_rounded ? unit_roundoff(problem.dtype) : 0);
  }
  result.reproduces = !on_any_rank(world, !reproduces, "comparison with an unsharded call");
  result.repeats = !on_any_rank(world, !repeats, "comparison of two calls");
  if (sharded_case.backward) {
    result.gradients = verify_gradients(sharded_case, with_all_columns, sharded_run,
                                        result.reduces_rounded, context, phase);
  }
  return result;
}

}  // namespace annulus::verification
