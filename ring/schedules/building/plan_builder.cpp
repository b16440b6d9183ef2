#include "schedules/building/plan_builder.hpp"

#include <utility>
#include <vector>

#include <annulus/attention/softmax_state.hpp>

namespace annulus::ring {
PlanBuilder::PlanBuilder(const RankContext& context) : TaskBuilder(context) {
  const AttentionProblem& problem = context.input.problem;
  for (const Content content : {Content::query, Content::key, Content::value, Content::output}) {
    add_caller(content, problem.dtype);
  }
  add_caller(problem.normalize_output ? Content::lse : Content::sum, DType::float32);
  add_caller_scores();
  if (!problem.normalize_output) add_caller(Content::maximum, DType::float32);
  add_rows(own_rows(), context.input.operands.query.positions(context.rank, 1),
           own_results({0, plan_.local.heads}), true);
}

void PlanBuilder::copy(int step, const Result& from, LocalPosition begin, const Result& to,
                       LocalRange rows) {
  const auto copy_one = [&](Content content, int source, int destination) {
    if (source < 0) return;
    copy(step, content, source, begin, destination, rows, from.output.heads);
  };
  copy_one(Content::output, from.output.buffer, to.output.buffer);
  copy_one(Content::lse, from.lse, to.lse);
  copy_one(Content::maximum, from.maximum, to.maximum);
}

Result PlanBuilder::add_complete_results(LocalRange rows, HeadRange heads, const Result* reuses) {
  return add_results(rows, heads, context_.input.problem.dtype, DType::float32, reuses);
}

Result PlanBuilder::add_partial_results(LocalRange rows, HeadRange heads, const Result* reuses) {
  return add_results(rows, heads, partial_dtype(context_.input.problem.dtype),
                     partial_lse_dtype(context_.input), reuses);
}

Result PlanBuilder::add_results(LocalRange rows, HeadRange heads, DType dtype, DType lse,
                                const Result* reuses) {
  const auto add = [&](Content content, DType type, int memory) {
    return add_exchange({content}, type, rows, heads, memory);
  };
  Result results;
  results.output = {add(Content::output, dtype, reuses == nullptr ? -1 : reuses->output.buffer),
                    rows, heads, batches()};
  results.lse = add(Content::lse, lse, reuses == nullptr ? -1 : reuses->lse);
  if (!context_.input.problem.normalize_output) {
    results.maximum =
        add(Content::maximum, DType::float32, reuses == nullptr ? -1 : reuses->maximum);
  }
  return results;
}

Result PlanBuilder::own_results(HeadRange heads) const {
  const bool normalized = context_.input.problem.normalize_output;
  return {{own(Content::output), all_rows(), heads, batches()},
          own(normalized ? Content::lse : Content::sum),
          own(Content::maximum)};
}

int PlanBuilder::add_rows(const RowBuffers& buffers, const PositionRanges& positions,
                          const Result& results, bool complete) {
  rows_.push_back({buffers, results, complete, BlockFinder(context_, plan_, positions)});
  return static_cast<int>(rows_.size()) - 1;
}

void PlanBuilder::add_blocks(int step, const Rows& rows, const PlacedColumns& columns,
                             std::vector<Block> blocks, bool awaiting) {
  for (Block& block : blocks) {
    block.query = rows.buffers.query;
    block.key = columns.key;
    block.value = columns.value;
    block.bias = rows.buffers.bias;
    block.dense_mask = rows.buffers.dense_mask;
    block.result = rows.results;
    block.awaits_columns = awaiting && rows.finder.awaits_columns(block);
    add_task(step, std::move(block));
  }
}

void PlanBuilder::compute(int step, int rows, HeadRange heads, const PlacedColumns& columns) {
  const Rows& of = rows_of(rows);
  add_blocks(step, of, columns, of.finder.find(heads, columns.pieces));
}

void PlanBuilder::compute_awaiting(int step, int rows, HeadRange heads,
                                   const PlacedColumns& columns) {
  const Rows& of = rows_of(rows);
  add_blocks(step, of, columns, of.finder.find_awaiting(heads, columns.pieces), true);
}

void PlanBuilder::complete(int step, int rows, HeadRange heads) {
  const Rows& of = rows_of(rows);
  Result into = of.results;
  into.output.heads = heads;
  reduce(step, {}, into, of.complete);
}

void PlanBuilder::reduce(int step, std::vector<Result> parts, const Result& into, bool complete) {
  const AttentionProblem& problem = context_.input.problem;
  add_task(step,
           Reduce{Reduction::softmax, std::move(parts), into, complete && problem.sinks.has_value(),
                  complete && !problem.normalize_output});
}

namespace {

template <class Body>
void each_message(const Result& results, const std::vector<LocalRange>& runs, const Body& body) {
  for (const int buffer : {results.output.buffer, results.lse, results.maximum}) {
    if (buffer < 0) continue;
    for (const LocalRange& rows : runs) body(buffer, rows);
  }
}

}  // namespace

void PlanBuilder::send(int step, int peer, int origin, const Result& results,
                       const std::vector<LocalRange>& runs) {
  each_message(results, runs,
               [&](int buffer, LocalRange rows) { send(step, peer, origin, buffer, rows); });
}

void PlanBuilder::receive(int step, int peer, int origin, const Result& results,
                          const std::vector<LocalRange>& runs) {
  each_message(results, runs,
               [&](int buffer, LocalRange rows) { receive(step, peer, origin, buffer, rows); });
}

RankPlan PlanBuilder::finish() {
  order_tasks();
  place_results(context_.input, plan_);
  add_dependencies(plan_);
  return std::move(plan_);
}

}  // namespace annulus::ring
