#include "schedules/building/task_builder.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

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
  return plan;
}

}  // namespace

TaskBuilder::TaskBuilder(const RankContext& context)
    : context_(context), plan_(empty_plan(context)) {}

void TaskBuilder::add_caller(Content content, DType dtype) {
  const bool rows = has_query_heads(content);
  add_caller(content, dtype, rows ? all_rows() : all_columns(),
             {0, rows ? plan_.local.heads : plan_.local.kv_heads});
}

void TaskBuilder::add_caller(Content content, DType dtype, LocalRange tokens, HeadRange heads) {
  plan_.buffers.push_back({BufferKind::caller, {content}, dtype, tokens, heads, -1});
}

void TaskBuilder::add_caller_scores() {
  const auto add = [&](Content content, DType dtype, const std::optional<NamedSharding>& sharding,
                       std::optional<Extents>& shape) {
    if (!sharding) return;
    shape = sharding->local_shape(context_.rank);
    add_caller(content, dtype, {LocalPosition(0), (*shape)[2]}, {0, (*shape)[1]});
  };
  const ShardedOperands& operands = context_.input.operands;
  add(Content::bias, DType::float32, operands.bias, plan_.bias);
  add(Content::dense_mask, DType::boolean, operands.dense_mask, plan_.dense_mask);
}

// Axes of size 1 do not make a new group, so the exchanges of the same ranks keep one order.
int TaskBuilder::add_group(const AxisNames& axes) {
  std::vector<int> ranks = context_.input.operands.key.mesh().group(context_.rank, axes);
  const auto known = std::ranges::find(plan_.groups, ranks, &PlanGroup::ranks);
  if (known != plan_.groups.end()) return static_cast<int>(known - plan_.groups.begin());
  const auto me = std::ranges::find(ranks, context_.rank) - ranks.begin();
  plan_.groups.push_back({axes, std::move(ranks), static_cast<int>(me)});
  return static_cast<int>(plan_.groups.size()) - 1;
}

// Buffers that reuse each other's memory all name the first one: a chain of thousands would be long
// to follow.
int TaskBuilder::owner(int reuses) const {
  return reuses < 0 ? -1 : plan_.memory_of(reuses);
}

int TaskBuilder::add_local(Content content, DType dtype, LocalRange tokens, HeadRange heads,
                           int reuses) {
  plan_.buffers.push_back({BufferKind::local, {content}, dtype, tokens, heads, owner(reuses)});
  return static_cast<int>(plan_.buffers.size()) - 1;
}

int TaskBuilder::add_exchange(std::vector<Content> contents, DType dtype, LocalRange tokens,
                              HeadRange heads, int reuses) {
  plan_.buffers.push_back(
      {BufferKind::exchange, std::move(contents), dtype, tokens, heads, owner(reuses)});
  return static_cast<int>(plan_.buffers.size()) - 1;
}

int TaskBuilder::add_key_value(LocalRange tokens, HeadRange kv_heads, int reuses) {
  return add_exchange({Content::key, Content::value}, context_.input.problem.dtype, tokens,
                      kv_heads, reuses);
}

int TaskBuilder::add_packed(LocalRange tokens, HeadRange kv_heads) {
  const int packed = add_key_value(tokens, kv_heads);
  copy_own(0, packed);
  return packed;
}

std::vector<Content> TaskBuilder::sent_with_rows() const {
  std::vector<Content> contents{Content::query};
  const auto add = [&](Content content, const std::optional<NamedSharding>& scores) {
    if (scores && scores->global_shape()[2] != 1) contents.push_back(content);
  };
  add(Content::bias, context_.input.operands.bias);
  add(Content::dense_mask, context_.input.operands.dense_mask);
  return contents;
}

HeadRange TaskBuilder::heads_of(Content content, HeadRange heads) const {
  const Extents* const scores = plan_.scores(content);
  return scores != nullptr && (*scores)[1] == 1 ? HeadRange{0, 1} : heads;
}

int TaskBuilder::add_row_buffer(Content content, LocalRange rows, HeadRange heads, int reuses,
                                std::optional<PositionRanges> columns) {
  const DType dtype = plan_.buffer(own(content)).dtype;
  const int index = add_exchange({content}, dtype, rows, heads_of(content, heads), reuses);
  if (content != Content::query) plan_.buffers.back().columns = std::move(columns);
  return index;
}

void TaskBuilder::copy_own(int step, int buffer, LocalPosition begin, LocalRange tokens) {
  const Buffer& to = plan_.buffer(buffer);
  for (const Content content : to.contents) {
    copy(step, content, own(content), begin, buffer, tokens, to.heads);
  }
}

void TaskBuilder::copy_own(int step, int buffer) {
  const LocalRange tokens = plan_.buffer(buffer).tokens;
  copy_own(step, buffer, tokens.begin, tokens);
}

void TaskBuilder::copy_own(int step, int buffer, const Gathering& gathering, int member) {
  for (const Gathering::Message& message : gathering.messages(member)) {
    copy_own(step, buffer, message.tokens.begin, message.placed());
  }
}

void TaskBuilder::gather(int step, int buffer, const Gathering& gathering) {
  const int me = context_.group_rank;
  copy_own(step, buffer, gathering, me);
  each_turn([&](int to, int from) {
    send(step, to, me, buffer, gathering.placed(me));
    receive(step, from, from, buffer, gathering.placed(from));
  });
}

void TaskBuilder::copy(int step, Content content, int from, LocalPosition from_begin, int to,
                       LocalRange to_tokens, HeadRange heads) {
  const Region region{to, to_tokens, heads, plan_.batches(plan_.buffer(to))};
  add_task(step, Copy{content, from, from_begin, region});
}

RowBuffers TaskBuilder::own_rows() const {
  return {own(Content::query), own(Content::bias), own(Content::dense_mask)};
}

PlacedColumns TaskBuilder::own_columns() const {
  return {own(Content::key), own(Content::value),
          side_by_side(context_.input.operands.key.positions(context_.rank, 1))};
}

HeadRange TaskBuilder::query_heads(HeadRange kv_heads) const {
  const std::int64_t ratio = plan_.local.heads_per_kv_head();
  return {kv_heads.begin * ratio, kv_heads.count * ratio};
}

Exchange& TaskBuilder::exchange_of(Slot slot) {
  const auto [known, fresh] = exchanges_.try_emplace(slot, plan_.tasks.size());
  if (fresh) add_task(slot.step, Exchange{slot.group, {}, {}, {}});
  return std::get<Exchange>(plan_.tasks[known->second].work);
}

Transfer TaskBuilder::transfer(int peer, int origin, int buffer, LocalRange tokens) const {
  return {peer, origin, buffer, tokens, tokens.count * plan_.token_bytes(plan_.buffer(buffer))};
}

void TaskBuilder::send(Slot slot, int peer, int origin, int buffer, LocalRange tokens) {
  const Transfer message = transfer(peer, origin, buffer, tokens);
  if (message.bytes > 0) exchange_of(slot).sends.push_back(message);
}

void TaskBuilder::receive(Slot slot, int peer, int origin, int buffer, LocalRange tokens) {
  const Transfer message = transfer(peer, origin, buffer, tokens);
  if (message.bytes > 0) exchange_of(slot).receives.push_back(message);
}

void TaskBuilder::send(Slot slot, int peer, int origin, int buffer,
                       const std::vector<LocalRange>& runs) {
  for (const LocalRange& run : runs) send(slot, peer, origin, buffer, run);
}

void TaskBuilder::receive(Slot slot, int peer, int origin, int buffer,
                          const std::vector<LocalRange>& runs) {
  for (const LocalRange& run : runs) receive(slot, peer, origin, buffer, run);
}

namespace {

// The order within a step: copies, exchanges, computation. Copies come first, since kernels that
// occupy all multiprocessors would delay the first transfer by more than the copies take.
int place_in_step(const Task& task) {
  if (std::holds_alternative<Copy>(task.work)) return 0;
  return std::holds_alternative<Exchange>(task.work) ? 1 : 2;
}

}  // namespace

// The order of the messages between two ranks stays.
void TaskBuilder::order_messages(Exchange& exchange) const {
  const int me = context_.group_rank;
  const auto sort = [](std::vector<Transfer>& messages, const auto& turn) {
    if (messages.size() < 2) return;
    std::ranges::stable_sort(messages, {}, [&](const Transfer& one) { return turn(one.peer); });
  };
  sort(exchange.sends, [&](int peer) { return context_.nodes.turn(me, peer); });
  sort(exchange.receives, [&](int peer) { return context_.nodes.turn(peer, me); });
}

// Tasks are large, and a rank of a large mesh has thousands, so each is moved once.
void TaskBuilder::order_tasks() {
  for (Task& task : plan_.tasks) {
    auto* exchange = std::get_if<Exchange>(&task.work);
    if (exchange != nullptr && exchange->group == 0) order_messages(*exchange);
  }
  std::vector<int> turns(plan_.tasks.size());
  for (const auto& [slot, task] : exchanges_) turns[task] = slot.turn;
  const auto key = [&](std::size_t index) {
    const Task& task = plan_.tasks[index];
    const auto* exchange = std::get_if<Exchange>(&task.work);
    return std::tuple(task.step, place_in_step(task), turns[index],
                      exchange == nullptr ? 0 : exchange->group);
  };
  std::vector<std::size_t> order(plan_.tasks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
  std::vector<Task> sorted;
  sorted.reserve(plan_.tasks.size());
  for (const std::size_t index : order) sorted.push_back(std::move(plan_.tasks[index]));
  plan_.tasks = std::move(sorted);
  exchanges_.clear();
}

}  // namespace annulus::ring
