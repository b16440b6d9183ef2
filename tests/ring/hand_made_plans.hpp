#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/partition/position.hpp>
#include <annulus/ring/plan.hpp>

#include "schedules/plan_builder.hpp"

/// Plans that no schedule makes yet: what a backward pass and ulysses will need. `rank` of `ranks`
/// in the only group; every rank holds `tokens` tokens.
namespace annulus::ring::test {

inline RankPlan hand_made(const AttentionShape& local, int rank, int ranks) {
  RankPlan plan;
  plan.rank = rank;
  plan.local = local;
  std::vector<int> all(static_cast<std::size_t>(ranks));
  for (int i = 0; i < ranks; ++i) all[static_cast<std::size_t>(i)] = i;
  plan.groups = {{{"sp"}, all, rank}};
  return plan;
}

inline int add_buffer(RankPlan& plan, BufferKind kind, std::vector<Content> contents, DType dtype,
                      LocalRange tokens, HeadRange heads) {
  plan.buffers.push_back({kind, std::move(contents), dtype, tokens, heads, -1});
  return static_cast<int>(plan.buffers.size()) - 1;
}

inline Region all_of(const RankPlan& plan, int buffer) {
  return {buffer, plan.buffer(buffer).tokens, plan.buffer(buffer).heads, {0, plan.local.batch}};
}

inline Transfer message(const RankPlan& plan, int peer, int origin, int buffer, LocalRange tokens) {
  return {peer, origin, buffer, tokens, tokens.count * plan.token_bytes(plan.buffer(buffer))};
}

inline void add_sum(RankPlan& plan, int step, std::vector<Region> parts, const Region& into) {
  Reduce reduce{Reduction::sum, {}, {into, -1}};
  for (const Region& part : parts) reduce.parts.push_back({part, -1});
  plan.tasks.push_back({std::move(reduce), step, {}});
}

/// Every rank has a contribution to the gradient of every rank's keys: caller buffer o is for those
/// of rank o, and the last one gets the sum of all ranks' contributions to its own. The sums move
/// from rank to rank, one hop behind the contributions, and the last hop brings them home.
inline RankPlan travelling_sums(const AttentionShape& local, int rank, int ranks) {
  RankPlan plan = hand_made(local, rank, ranks);
  const LocalRange tokens{LocalPosition(0), local.kv_length};
  const HeadRange heads{0, local.kv_heads};
  const std::vector<Content> contents{Content::grad_key};
  std::vector<int> contribution;
  for (int o = 0; o <= ranks; ++o) {
    contribution.push_back(
        add_buffer(plan, BufferKind::caller, contents, DType::float32, tokens, heads));
  }
  const int result = contribution.back();
  if (ranks == 1) {  // a group of one moves nothing
    add_sum(plan, 0, {all_of(plan, contribution.front())}, all_of(plan, result));
    return plan;
  }
  const int travelling[2] = {
      add_buffer(plan, BufferKind::exchange, contents, DType::float32, tokens, heads),
      add_buffer(plan, BufferKind::exchange, contents, DType::float32, tokens, heads)};
  const int right = (rank + 1) % ranks;
  const int left = (rank + ranks - 1) % ranks;
  add_sum(plan, 0, {all_of(plan, contribution[static_cast<std::size_t>(rank)])},
          all_of(plan, travelling[0]));
  for (int hop = 1; hop <= ranks; ++hop) {
    const int origin = (rank + ranks - hop % ranks) % ranks;
    const int from = travelling[(hop + 1) % 2];
    const int to = travelling[hop % 2];
    plan.tasks.push_back({Exchange{0,
                                   {message(plan, right, (origin + 1) % ranks, from, tokens)},
                                   {message(plan, left, origin, to, tokens)},
                                   {}},
                          hop,
                          {}});
    if (hop == ranks) {
      add_sum(plan, hop, {all_of(plan, to)}, all_of(plan, result));
    } else {
      add_sum(plan, hop,
              {all_of(plan, to), all_of(plan, contribution[static_cast<std::size_t>(origin)])},
              all_of(plan, to));
    }
  }
  add_dependencies(plan);
  return plan;
}

/// The same sums, by a reduce-scatter at the end: every contribution goes straight to its owner,
/// who adds them in order of rank.
inline RankPlan scattered_sums(const AttentionShape& local, int rank, int ranks) {
  RankPlan plan = hand_made(local, rank, ranks);
  const LocalRange tokens{LocalPosition(0), local.kv_length};
  const HeadRange heads{0, local.kv_heads};
  const std::vector<Content> contents{Content::grad_key};
  std::vector<int> contribution;
  for (int o = 0; o <= ranks; ++o) {
    contribution.push_back(
        add_buffer(plan, BufferKind::caller, contents, DType::float32, tokens, heads));
  }
  Exchange exchange;
  std::vector<Region> parts;
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) {
      parts.push_back(all_of(plan, contribution[static_cast<std::size_t>(rank)]));
      continue;
    }
    const int packed =
        add_buffer(plan, BufferKind::exchange, contents, DType::float32, tokens, heads);
    const int received =
        add_buffer(plan, BufferKind::exchange, contents, DType::float32, tokens, heads);
    plan.tasks.push_back({Copy{Content::grad_key, contribution[static_cast<std::size_t>(peer)],
                               tokens.begin, all_of(plan, packed)},
                          0,
                          {}});
    exchange.sends.push_back(message(plan, peer, peer, packed, tokens));
    exchange.receives.push_back(message(plan, peer, rank, received, tokens));
    parts.push_back(all_of(plan, received));
  }
  if (ranks > 1) plan.tasks.push_back({std::move(exchange), 0, {}});
  add_sum(plan, 1, parts, all_of(plan, contribution.back()));
  add_dependencies(plan);
  return plan;
}

/// Attention of the whole sequence for some of the heads: heads are exchanged for sequence before,
/// and outputs and LSE back afterwards. The heads of `local` are all of them; `ranks` divide them.
inline RankPlan heads_for_sequence(const AttentionShape& local, DType dtype, int rank, int ranks) {
  RankPlan plan = hand_made(local, rank, ranks);
  plan.implementations = {"native"};
  const std::int64_t n = local.query_length;
  const LocalRange mine{LocalPosition(0), n};
  const LocalRange whole{LocalPosition(0), n * ranks};
  const auto heads_of = [&](std::int64_t heads, int r) {
    return HeadRange{heads / ranks * r, heads / ranks};
  };
  const auto all_heads = [&](Content content) {
    return HeadRange{0, has_query_heads(content) ? local.heads : local.kv_heads};
  };
  for (const Content content :
       {Content::query, Content::key, Content::value, Content::output, Content::lse}) {
    add_buffer(plan, BufferKind::caller, {content},
               content == Content::lse ? DType::float32 : dtype, mine, all_heads(content));
  }
  // Exchanges contents: `sent` tokens of each peer's heads before, of each peer's tokens after.
  Exchange before;
  std::vector<int> gathered;
  for (const auto& [content, caller] : {std::pair(Content::query, PlanBuilder::kQuery),
                                        std::pair(Content::key, PlanBuilder::kKey),
                                        std::pair(Content::value, PlanBuilder::kValue)}) {
    const std::int64_t heads = all_heads(content).count;
    const HeadRange my_heads = heads_of(heads, rank);
    const int to = add_buffer(plan, BufferKind::exchange, {content}, dtype, whole, my_heads);
    gathered.push_back(to);
    const auto part_of = [&](int r) { return LocalRange{LocalPosition(n * r), n}; };
    plan.tasks.push_back({Copy{content, caller, mine.begin,
                               {to, part_of(rank), my_heads, {0, local.batch}}},
                          0,
                          {}});
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == rank) continue;
      const int packed = add_buffer(plan, BufferKind::exchange, {content}, dtype, mine,
                                    heads_of(heads, peer));
      plan.tasks.push_back({Copy{content, caller, mine.begin, all_of(plan, packed)}, 0, {}});
      before.sends.push_back(message(plan, peer, rank, packed, mine));
      before.receives.push_back(message(plan, peer, peer, to, part_of(peer)));
    }
  }
  if (ranks > 1) plan.tasks.push_back({std::move(before), 0, {}});

  const HeadRange my_heads = heads_of(local.heads, rank);
  const int output = add_buffer(plan, BufferKind::exchange, {Content::output}, DType::float32,
                                whole, my_heads);
  const int lse =
      add_buffer(plan, BufferKind::exchange, {Content::lse}, DType::float64, whole, my_heads);
  Block block;
  block.rows = block.columns = whole;
  block.row_positions = block.column_positions = PositionRanges::all(whole.count);
  block.heads = my_heads;
  block.batches = {0, local.batch};
  block.query = gathered[0];
  block.key = gathered[1];
  block.value = gathered[2];
  block.pairs = 1;
  block.result = {{output, whole, my_heads, block.batches}, lse};
  plan.tasks.push_back({block, 1, {}});

  Exchange after;
  std::vector<Reduce> reductions;
  const auto reduce = [&](const Result& part) {
    Result into = part;
    into.output.buffer = PlanBuilder::kOutput;
    into.output.tokens = mine;
    into.lse = PlanBuilder::kLse;
    reductions.push_back({Reduction::softmax, {part}, into});
  };
  const LocalRange my_tokens{LocalPosition(n * rank), n};
  // Parts are numbered as the whole is: a buffer of the rank's own tokens for its own result too.
  for (int peer = 0; peer < ranks; ++peer) {
    const HeadRange heads = heads_of(local.heads, peer);
    const int received_output =
        add_buffer(plan, BufferKind::exchange, {Content::output}, DType::float32, mine, heads);
    const int received_lse =
        add_buffer(plan, BufferKind::exchange, {Content::lse}, DType::float64, mine, heads);
    if (peer == rank) {
      plan.tasks.push_back({Copy{Content::output, output, my_tokens.begin,
                                 all_of(plan, received_output)},
                            2,
                            {}});
      plan.tasks.push_back(
          {Copy{Content::lse, lse, my_tokens.begin, all_of(plan, received_lse)}, 2, {}});
    } else {
      const LocalRange theirs{LocalPosition(n * peer), n};
      after.sends.push_back(message(plan, peer, rank, output, theirs));
      after.sends.push_back(message(plan, peer, rank, lse, theirs));
      after.receives.push_back(message(plan, peer, peer, received_output, mine));
      after.receives.push_back(message(plan, peer, peer, received_lse, mine));
    }
    reduce({all_of(plan, received_output), received_lse});
  }
  if (ranks > 1) plan.tasks.push_back({std::move(after), 2, {}});
  for (Reduce& one : reductions) plan.tasks.push_back({std::move(one), 2, {}});
  add_dependencies(plan);
  return plan;
}

}  // namespace annulus::ring::test
