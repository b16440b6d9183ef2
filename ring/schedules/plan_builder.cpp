#include "schedules/plan_builder.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

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
  plan.groups.push_back({input.operands.key.spec()[1], context.needs.group(), context.group_rank});
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
    : context_(context), plan_(empty_plan(context)), finder_(context, plan_) {}

int PlanBuilder::add_key_value(LocalRange tokens, HeadRange kv_heads, int reuses) {
  plan_.buffers.push_back({BufferKind::exchange,
                           {Content::key, Content::value},
                           context_.input.problem.dtype,
                           tokens,
                           kv_heads,
                           reuses});
  return static_cast<int>(plan_.buffers.size()) - 1;
}

int PlanBuilder::add_packed(LocalRange tokens, HeadRange kv_heads) {
  const int packed = add_key_value(tokens, kv_heads);
  pack(tokens, packed, tokens.begin);
  return packed;
}

void PlanBuilder::pack(LocalRange tokens, int buffer, LocalPosition to) {
  const Region region{
      buffer, {to, tokens.count}, plan_.buffer(buffer).heads, {0, plan_.local.batch}};
  // Packing comes first: kernels that take all multiprocessors would delay the first transfer by
  // more than the packing takes.
  plan_.tasks.push_back({Copy{Content::key, kKey, tokens.begin, region}, 0, {}});
  plan_.tasks.push_back({Copy{Content::value, kValue, tokens.begin, region}, 0, {}});
}

std::vector<PlacedPiece> PlanBuilder::own_columns() const {
  std::vector<PlacedPiece> placed;
  std::int64_t token = 0;
  const PositionRanges columns = context_.input.operands.key.positions(context_.rank, 1);
  for (const PositionRange& chunk : columns.ranges()) {
    placed.push_back({{{LocalPosition(token), chunk.length}, chunk}, token});
    token += chunk.length;
  }
  return placed;
}

HeadRange PlanBuilder::query_heads(HeadRange kv_heads) const {
  const std::int64_t ratio = plan_.local.heads_per_kv_head();
  return {kv_heads.begin * ratio, kv_heads.count * ratio};
}

void PlanBuilder::add_blocks(int step, int key, int value, std::vector<Block> blocks) {
  for (Block& block : blocks) {
    block.query = kQuery;
    block.key = key;
    block.value = value;
    block.bias = plan_.caller_buffer(Content::bias);
    block.dense_mask = plan_.caller_buffer(Content::dense_mask);
    plan_.tasks.push_back({std::move(block), step, {}});
  }
}

void PlanBuilder::compute(int step, int key, int value, HeadRange kv_heads,
                          const std::vector<PlacedPiece>& columns) {
  add_blocks(step, key, value, finder_.find(query_heads(kv_heads), columns));
}

void PlanBuilder::compute_awaiting(int step, int buffer, HeadRange kv_heads,
                                   const std::vector<PlacedPiece>& columns) {
  std::vector<Block> blocks = finder_.find_awaiting(query_heads(kv_heads), columns);
  for (Block& block : blocks) block.awaits_columns = finder_.awaits_columns(block);
  add_blocks(step, buffer, buffer, std::move(blocks));
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
  exchange_of(step).sends.push_back(transfer(peer, origin, buffer, tokens));
}

void PlanBuilder::receive(int step, int peer, int origin, int buffer, LocalRange tokens) {
  exchange_of(step).receives.push_back(transfer(peer, origin, buffer, tokens));
}

namespace {

// By step; in a step copies, exchanges and blocks, which stand in this order in the variant. Tasks
// are large, and a rank of a large mesh has thousands, so each is moved once.
std::vector<Task> in_order(std::vector<Task> tasks) {
  std::vector<std::size_t> order(tasks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(tasks[a].step, tasks[a].work.index()) <
           std::pair(tasks[b].step, tasks[b].work.index());
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
