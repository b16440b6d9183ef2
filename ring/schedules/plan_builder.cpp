#include "schedules/plan_builder.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

#include <annulus/attention/softmax_state.hpp>

namespace annulus::ring {
namespace {

// First global position of a dimension of a shard; 0 for an empty one.
std::int64_t first_of(const NamedSharding& sharding, int rank, int dim) {
  const PositionRanges positions = sharding.positions(rank, dim);
  return positions.empty() ? 0 : positions.global(LocalPosition(0)).value();
}

RankPlan empty_plan(const RankContext& context) {
  const PlanInput& input = context.input;
  const Extents query = input.operands.query.local_shape(context.rank);
  const Extents key = input.operands.key.local_shape(context.rank);
  RankPlan plan;
  plan.rank = context.rank;
  plan.local = {
      query[0], query[1], key[1], query[2], key[2], query[3], input.problem.shape.value_dim};
  plan.first_batch = first_of(input.operands.query, context.rank, 0);
  plan.first_head = first_of(input.operands.query, context.rank, 2);
  plan.groups.push_back({input.operands.key.spec()[1], context.group, context.group_rank});
  for (const Implementation* candidate : input.candidates) {
    plan.implementations.push_back(candidate->names().front());
  }
  const DType dtype = input.problem.dtype;
  const LocalRange rows{LocalPosition(0), query[1]};
  const LocalRange columns{LocalPosition(0), key[1]};
  const auto add = [&](Content content, DType type, LocalRange tokens) {
    plan.buffers.push_back({BufferKind::caller,
                            {content},
                            type,
                            tokens,
                            {0, has_query_heads(content) ? query[2] : key[2]},
                            -1});
  };
  add(Content::query, dtype, rows);
  add(Content::key, dtype, columns);
  add(Content::value, dtype, columns);
  add(Content::output, dtype, rows);
  add(input.problem.normalize_output ? Content::lse : Content::sum, DType::float32, rows);
  const auto add_scores = [&](Content content, DType type,
                              const std::optional<NamedSharding>& sharding,
                              std::optional<Extents>& shape) {
    if (!sharding) return;
    shape = sharding->local_shape(context.rank);
    plan.buffers.push_back({BufferKind::caller,
                            {content},
                            type,
                            {LocalPosition(0), (*shape)[2]},
                            {0, (*shape)[1]},
                            -1});
  };
  add_scores(Content::bias, DType::float32, input.operands.bias, plan.bias);
  add_scores(Content::dense_mask, DType::boolean, input.operands.dense_mask, plan.dense_mask);
  if (!input.problem.normalize_output) add(Content::maximum, DType::float32, rows);
  return plan;
}

}  // namespace

PlanBuilder::PlanBuilder(const RankContext& context)
    : context_(context), plan_(empty_plan(context)) {
  add_rows(own_rows(), context.input.operands.query.positions(context.rank, 1),
           own_results({0, plan_.local.heads}), true);
}

int PlanBuilder::add_exchange(std::vector<Content> contents, DType dtype, LocalRange tokens,
                              HeadRange heads, int reuses) {
  plan_.buffers.push_back(
      {BufferKind::exchange, std::move(contents), dtype, tokens, heads, reuses});
  return static_cast<int>(plan_.buffers.size()) - 1;
}

int PlanBuilder::add_key_value(LocalRange tokens, HeadRange kv_heads, int reuses) {
  return add_exchange({Content::key, Content::value}, context_.input.problem.dtype, tokens,
                      kv_heads, reuses);
}

int PlanBuilder::add_packed(LocalRange tokens, HeadRange kv_heads) {
  const int packed = add_key_value(tokens, kv_heads);
  pack(tokens, packed, tokens.begin);
  return packed;
}

// Packing comes first: kernels that take all multiprocessors would delay the first transfer by
// more than the packing takes.
void PlanBuilder::pack(LocalRange tokens, int buffer, LocalPosition to, int step) {
  const HeadRange heads = plan_.buffer(buffer).heads;
  copy(step, Content::key, kKey, tokens.begin, buffer, {to, tokens.count}, heads);
  copy(step, Content::value, kValue, tokens.begin, buffer, {to, tokens.count}, heads);
}

std::vector<Content> PlanBuilder::sent_with_rows() const {
  std::vector<Content> contents{Content::query};
  const auto add = [&](Content content, const std::optional<NamedSharding>& scores) {
    if (scores && scores->global_shape()[2] != 1) contents.push_back(content);
  };
  add(Content::bias, context_.input.operands.bias);
  add(Content::dense_mask, context_.input.operands.dense_mask);
  return contents;
}

HeadRange PlanBuilder::heads_of(Content content, HeadRange heads) const {
  const Extents* const scores = plan_.scores(content);
  return scores != nullptr && (*scores)[1] == 1 ? HeadRange{0, 1} : heads;
}

int PlanBuilder::add_row_buffer(Content content, LocalRange rows, HeadRange heads, int reuses,
                                std::optional<PositionRanges> columns) {
  const DType dtype = plan_.buffer(plan_.caller_buffer(content)).dtype;
  const int index = add_exchange({content}, dtype, rows, heads_of(content, heads), reuses);
  if (content != Content::query) plan_.buffers.back().columns = std::move(columns);
  return index;
}

void PlanBuilder::copy_own(int step, Content content, LocalPosition begin, int to,
                           LocalRange to_rows) {
  copy(step, content, plan_.caller_buffer(content), begin, to, to_rows, plan_.buffer(to).heads);
}

void PlanBuilder::copy(int step, Content content, int from, LocalPosition from_begin, int to,
                       LocalRange to_tokens, HeadRange heads) {
  const Region region{to, to_tokens, heads, plan_.batches(plan_.buffer(to))};
  plan_.tasks.push_back({Copy{content, from, from_begin, region}, step, {}});
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
  return {{kOutput, {LocalPosition(0), plan_.local.query_length}, heads, batches()},
          kLse,
          plan_.caller_buffer(Content::maximum)};
}

RowBuffers PlanBuilder::own_rows() const {
  return {kQuery, plan_.caller_buffer(Content::bias), plan_.caller_buffer(Content::dense_mask)};
}

int PlanBuilder::add_rows(const RowBuffers& buffers, const PositionRanges& positions,
                          const Result& results, bool complete) {
  rows_.push_back({buffers, results, complete, BlockFinder(context_, plan_, positions)});
  return static_cast<int>(rows_.size()) - 1;
}

PlacedColumns PlanBuilder::own_columns() const {
  PlacedColumns placed{kKey, kValue, {}};
  std::int64_t token = 0;
  const PositionRanges columns = context_.input.operands.key.positions(context_.rank, 1);
  for (const PositionRange& chunk : columns.ranges()) {
    placed.pieces.push_back({{{LocalPosition(token), chunk.length}, chunk}, token});
    token += chunk.length;
  }
  return placed;
}

HeadRange PlanBuilder::query_heads(HeadRange kv_heads) const {
  const std::int64_t ratio = plan_.local.heads_per_kv_head();
  return {kv_heads.begin * ratio, kv_heads.count * ratio};
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
    plan_.tasks.push_back({std::move(block), step, {}});
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
  plan_.tasks.push_back(
      {Reduce{Reduction::softmax, std::move(parts), into, complete && problem.sinks.has_value(),
              complete && !problem.normalize_output},
       step,
       {}});
}

Exchange& PlanBuilder::exchange_of(int step) {
  const auto [known, fresh] = exchanges_.try_emplace(step, plan_.tasks.size());
  if (fresh) plan_.tasks.push_back({Exchange{}, step, {}});
  return std::get<Exchange>(plan_.tasks[known->second].work);
}

Transfer PlanBuilder::transfer(int peer, int origin, int buffer, LocalRange tokens) const {
  return {peer, origin, buffer, tokens, tokens.count * plan_.token_bytes(plan_.buffer(buffer))};
}

void PlanBuilder::send(int step, int peer, int origin, int buffer, LocalRange tokens) {
  const Transfer message = transfer(peer, origin, buffer, tokens);
  if (message.bytes > 0) exchange_of(step).sends.push_back(message);
}

void PlanBuilder::receive(int step, int peer, int origin, int buffer, LocalRange tokens) {
  const Transfer message = transfer(peer, origin, buffer, tokens);
  if (message.bytes > 0) exchange_of(step).receives.push_back(message);
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

namespace {

// Copies, exchanges, and what is computed.
int place_in_step(const Task& task) {
  if (std::holds_alternative<Copy>(task.work)) return 0;
  return std::holds_alternative<Exchange>(task.work) ? 1 : 2;
}

// Tasks are large, and a rank of a large mesh has thousands, so each is moved once.
std::vector<Task> in_order(std::vector<Task> tasks) {
  std::vector<std::size_t> order(tasks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(tasks[a].step, place_in_step(tasks[a])) <
           std::pair(tasks[b].step, place_in_step(tasks[b]));
  });
  std::vector<Task> sorted;
  sorted.reserve(tasks.size());
  for (const std::size_t index : order) sorted.push_back(std::move(tasks[index]));
  return sorted;
}

}  // namespace

RankPlan PlanBuilder::finish() {
  plan_.tasks = in_order(std::move(plan_.tasks));
  place_results(context_.input, plan_);
  add_dependencies(plan_);
  return std::move(plan_);
}

}  // namespace annulus::ring
