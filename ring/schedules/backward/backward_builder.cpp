#include "schedules/backward/backward_builder.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/error.hpp>

#include "exact_sum.hpp"
#include "schedules/building/plan_builder.hpp"

namespace annulus::ring {
namespace {

// Sinks and bias are float32 in every problem.
constexpr DType kScoresDtype = DType::float32;
constexpr int kReplicaTurn = 2;  // after the exchanges of a schedule in the same step

// Part `i` of `parts` of some tokens.
LocalRange part_of(const LocalRange& tokens, std::size_t i, std::size_t parts) {
  const auto cut = [&](std::size_t at) {
    return tokens.count * static_cast<std::int64_t>(at) / static_cast<std::int64_t>(parts);
  };
  return {tokens.begin + cut(i), cut(i + 1) - cut(i)};
}

}  // namespace

BackwardBuilder::BackwardBuilder(const RankContext& context)
    : TaskBuilder(context),
      row_replicas_(replicas_of(context.input.operands, Operand::rows, context.rank)),
      column_replicas_(replicas_of(context.input.operands, Operand::columns, context.rank)) {
  const BackwardRequest& request = context.input.backward.value();
  const DType dtype = context.input.problem.dtype;
  for (const Content content : {Content::query, Content::key, Content::value, Content::output}) {
    add_caller(content, dtype);
  }
  add_caller(Content::lse, DType::float32);
  add_caller_scores();
  add_caller(Content::grad_output, dtype);
  if (request.grad_lse) add_caller(Content::grad_lse, DType::float32);
  for (const Content content : {Content::grad_query, Content::grad_key, Content::grad_value}) {
    add_caller(content, dtype);
  }
  if (request.grad_sinks) {
    const Sinks& sinks = context.input.problem.sinks.value();
    plan_.sinks_per_head = sinks.per_head();
    add_caller(Content::grad_sinks, kScoresDtype, {LocalPosition(0), 1},
               {0, sinks.shape().rank() == 1 ? 1 : plan_.local.heads});
  }
  if (request.grad_bias) {
    const Buffer bias = plan_.buffer(own(Content::bias));
    add_caller(Content::grad_bias, kScoresDtype, bias.tokens, bias.heads);
    bias_replicas_ = replicas_of_bias(context.input.operands, context.rank);
  }

  // Terms that are added to the caller's gradients one by one would be summed in another order.
  const bool adds_terms = request.adds && context.input.problem.in_global_order();
  const bool in_place = gradient_dtype() == dtype && !adds_terms;
  const HeadRange heads{0, plan_.local.heads};
  const HeadRange kv_heads{0, plan_.local.kv_heads};
  BackwardRows rows{TaskBuilder::own_rows(), own(Content::grad_output), own(Content::lse), -1, -1};
  rows.delta = delta_ = add_local(Content::delta, partial_dtype(dtype), all_rows(), heads);
  if (row_replicas_.several()) {
    rows.grad_query = add_exchange({Content::grad_query}, gradient_dtype(), all_rows(), heads);
  } else {
    rows.grad_query = in_place
                          ? own(Content::grad_query)
                          : add_local(Content::grad_query, gradient_dtype(), all_rows(), heads);
  }
  if (column_replicas_.several()) {
    own_columns_ = add_column_gradients(all_columns(), kv_heads);
  } else if (in_place) {
    own_columns_ = {own(Content::grad_key), own(Content::grad_value)};
  } else {
    own_columns_ = {add_local(Content::grad_key, gradient_dtype(), all_columns(), kv_heads),
                    add_local(Content::grad_value, gradient_dtype(), all_columns(), kv_heads)};
  }
  if (request.grad_bias) {
    const int bias = own(Content::grad_bias);
    const Buffer held = plan_.buffer(bias);
    rows.grad_bias = bias_replicas_.several()
                         ? add_exchange({Content::grad_bias}, kScoresDtype, held.tokens, held.heads)
                     : adds_terms
                         ? add_local(Content::grad_bias, kScoresDtype, held.tokens, held.heads)
                         : bias;
  }
  if (plan_.local.query_length > 0) {
    add_task(0, Delta{whole(own(Content::output)), own(Content::grad_output),
                      own(Content::grad_lse), rows.delta});
  }
  if (request.grad_sinks) add_sink_gradient(rows.delta);
  add_rows(rows, context.input.operands.query.positions(context.rank, 1));
}

// A sum over rows and batches, and over heads that share sinks. It is small, and complete early. If
// bits must not depend on the ranks, it travels in parts that are added without rounding.
void BackwardBuilder::add_sink_gradient(int delta) {
  const bool shared = context_.input.problem.sinks->shape().rank() == 1;
  const int result = own(Content::grad_sinks);
  const LocalRange token = plan_.buffer(result).tokens;
  const HeadRange heads = plan_.buffer(result).heads;
  const Replicas replicas = replicas_of_sinks(context_.input.operands, shared, context_.rank);
  const bool exact = context_.input.problem.in_global_order();
  const DType dtype = exact ? DType::float64 : kScoresDtype;
  const LocalRange parts = exact ? LocalRange{LocalPosition(0), kExactParts} : token;
  int partial = result;
  if (replicas.several()) {
    partial = add_exchange({Content::grad_sinks}, dtype, parts, heads);
  } else if (exact || context_.input.backward->adds) {
    partial = add_local(Content::grad_sinks, dtype, parts, heads);
  }
  if (plan_.local.query_length > 0) {
    add_task(0, SinkGradient{whole(delta), own(Content::lse), partial});
  }
  if (!exact) return add_up(0, replicas, {partial}, {Content::grad_sinks}, dtype);
  const Total total = total_of(0, replicas, partial, {Content::grad_sinks}, dtype);
  const int complete = add_local(Content::grad_sinks, dtype, token, heads);
  std::vector<Region> terms;  // largest first
  for (std::int64_t i = parts.count; i-- > 0;) {
    terms.push_back(whole(total.buffer).at({LocalPosition(i), 1}));
  }
  sum(total.step, std::move(terms), whole(complete));
  put(total.step, Content::grad_sinks, whole(complete), token);
}

DType BackwardBuilder::gradient_dtype() const {
  return partial_dtype(context_.input.problem.dtype);
}

DType BackwardBuilder::wire_dtype() const {
  const DType wanted = context_.input.options.grad_wire;
  return size_of(wanted) < size_of(gradient_dtype()) ? wanted : gradient_dtype();
}

DType BackwardBuilder::complete_dtype() const {
  return context_.input.backward->adds ? gradient_dtype() : context_.input.problem.dtype;
}

int BackwardBuilder::add_rows(const BackwardRows& buffers, const PositionRanges& positions) {
  rows_.push_back({buffers, BlockFinder(context_, plan_, positions)});
  return static_cast<int>(rows_.size()) - 1;
}

ColumnGradients BackwardBuilder::add_column_gradients(LocalRange tokens, HeadRange kv_heads,
                                                      int reuses) {
  const int buffer = add_exchange({Content::grad_key, Content::grad_value}, gradient_dtype(),
                                  tokens, kv_heads, reuses);
  return {buffer, buffer};
}

int BackwardBuilder::add_wire_gradients(LocalRange tokens, HeadRange kv_heads, int reuses) {
  return add_exchange({Content::grad_key, Content::grad_value}, wire_dtype(), tokens, kv_heads,
                      reuses);
}

int BackwardBuilder::for_wire(int step, int buffer, int reuses) {
  const Buffer held = plan_.buffer(buffer);
  if (held.dtype == wire_dtype()) return buffer;
  const int rounded = add_wire_gradients(held.tokens, held.heads, reuses);
  sum(step, {whole(buffer)}, whole(rounded));
  return rounded;
}

void BackwardBuilder::compute(int step, int rows, HeadRange heads, const PlacedColumns& columns,
                              const ColumnGradients& gradients) {
  const Rows& of = rows_[static_cast<std::size_t>(rows)];
  const GradientSides sides{of.buffers.grad_query >= 0, gradients.key >= 0};
  for (const Block& found : of.finder.find(heads, columns.pieces, sides)) {
    BackwardBlock block;
    static_cast<Tile&>(block) = found;
    block.query = of.buffers.operands.query;
    block.bias = of.buffers.operands.bias;
    block.dense_mask = of.buffers.operands.dense_mask;
    block.key = columns.key;
    block.value = columns.value;
    block.grad_output = of.buffers.grad_output;
    block.lse = of.buffers.lse;
    block.delta = of.buffers.delta;
    const HeadRange kv_heads = plan_.kv_heads_of(block.heads);
    block.grad_query = {of.buffers.grad_query, block.rows, block.heads, block.batches};
    block.grad_key = {gradients.key, block.columns, kv_heads, block.batches};
    block.grad_value = {gradients.value, block.columns, kv_heads, block.batches};
    if (of.buffers.grad_bias >= 0) {
      block.grad_bias = plan_.scores_of(block, of.buffers.grad_bias);
    }
    block.repeats_bits =
        context_.input.problem.repeats_bits({context_.input.prices.model.device, 0});
    add_task(step, std::move(block));
  }
}

// A reduction takes a limited number of parts. If there are more, the first ones are added in the
// memory of the first part, without rounding.
void BackwardBuilder::sum(int step, std::vector<Region> parts, const Region& into) {
  const auto reduce = [&](std::size_t count, const Region& target) {
    Reduce one{Reduction::sum, {}, {target}};
    for (std::size_t i = 0; i < count; ++i) one.parts.push_back({parts[i]});
    add_task(step, std::move(one));
  };
  while (parts.size() > static_cast<std::size_t>(kMaximumParts)) {
    reduce(kMaximumParts, parts.front());
    parts.erase(parts.begin() + 1, parts.begin() + kMaximumParts);
  }
  reduce(parts.size(), into);
}

void BackwardBuilder::add_columns(int step, const Region& part, LocalRange columns,
                                  const ColumnGradients& into) {
  const auto add_to = [&](int buffer) {
    const Region sums = part.in(buffer).at(columns);
    sum(step, {sums, part}, sums);
  };
  add_to(into.key);
  if (into.value != into.key) add_to(into.value);
}

void BackwardBuilder::add_columns(int step, int buffer, const std::vector<LocalRange>& runs,
                                  const ColumnGradients& into) {
  LocalPosition token = plan_.buffer(buffer).tokens.begin;
  for (const LocalRange& run : runs) {
    add_columns(step, whole(buffer).at({token, run.count}), run, into);
    token = token + run.count;
  }
}

bool BackwardBuilder::bias_moves() const {
  return own(Content::grad_bias) >= 0 && std::ranges::count(sent_with_rows(), Content::bias) > 0;
}

void BackwardBuilder::add_to_own_bias(int step, const Region& part, LocalRange own_rows) {
  const Region into = part.in(own_backward_rows().grad_bias).at(own_rows);
  sum(step, {into, part}, into);
}

void BackwardBuilder::put(int step, Content content, const Region& complete,
                          LocalRange own_tokens) {
  const Region into = complete.in(own(content)).at(own_tokens);
  if (into == complete) return;
  std::vector<Region> parts;
  if (context_.input.backward->adds) parts.push_back(into);
  parts.push_back(complete);
  sum(step, std::move(parts), into);
}

void BackwardBuilder::finish_rows(int step) {
  add_up(step, row_replicas_, {rows_.front().buffers.grad_query}, {Content::grad_query},
         complete_dtype());
  finish_bias(step);
}

void BackwardBuilder::finish_bias(int step) {
  const int partial = own_backward_rows().grad_bias;
  if (partial < 0) return;
  add_up(step, bias_replicas_, {partial}, {Content::grad_bias}, kScoresDtype);
}

void BackwardBuilder::finish_columns(int step) {
  add_up(step, column_replicas_, {own_columns_.key, own_columns_.value},
         {Content::grad_key, Content::grad_value}, complete_dtype());
}

void BackwardBuilder::add_up(int step, const Replicas& replicas, const std::vector<int>& partial,
                             const std::vector<Content>& contents, DType complete) {
  const LocalRange tokens = plan_.buffer(partial.front()).tokens;
  if (!replicas.several()) {
    for (std::size_t i = 0; i < contents.size(); ++i) {
      put(step, contents[i], whole(partial[i]), tokens);
    }
    return;
  }
  // The first buffer holds all contents.
  const Total total = total_of(step, replicas, partial.front(), contents, complete);
  for (const Content content : contents) put(total.step, content, whole(total.buffer), tokens);
}

// Each member adds up a part of the tokens, in the order of the members, and sends the sum to the
// others: all get the same bits.
BackwardBuilder::Total BackwardBuilder::total_of(int step, const Replicas& replicas, int mine,
                                                 const std::vector<Content>& contents,
                                                 DType complete) {
  if (!replicas.several()) return {mine, step};
  const LocalRange tokens = plan_.buffer(mine).tokens;
  const int group = add_group(replicas.axes);
  const HeadRange heads = plan_.buffer(mine).heads;
  const std::size_t count = replicas.members.size();
  const int me = plan_.groups[static_cast<std::size_t>(group)].rank;
  const auto at =
      static_cast<std::size_t>(std::ranges::find(replicas.members, me) - replicas.members.begin());
  const LocalRange own_part = part_of(tokens, at, count);
  const int total = add_exchange(contents, complete, tokens, heads);
  const Slot scatter(step + 1, kReplicaTurn, group);
  const Slot gather(step + 2, kReplicaTurn, group);
  std::vector<Region> parts;
  for (std::size_t i = 0; i < count; ++i) {
    const int member = replicas.members[i];
    if (i == at) {
      parts.push_back(whole(mine).at(own_part));
      continue;
    }
    const int received = add_exchange(contents, plan_.buffer(mine).dtype, own_part, heads);
    const LocalRange their_part = part_of(tokens, i, count);
    send(scatter, member, member, mine, their_part);
    receive(scatter, member, me, received, own_part);
    parts.push_back(whole(received));
    send(gather, member, me, total, own_part);
    receive(gather, member, member, total, their_part);
  }
  sum(step + 1, std::move(parts), whole(total).at(own_part));
  return {total, step + 2};
}

RankPlan BackwardBuilder::finish() {
  order_tasks();
  begin_gradients(plan_, context_.input.backward->adds);
  add_dependencies(plan_);
  return std::move(plan_);
}

}  // namespace annulus::ring
