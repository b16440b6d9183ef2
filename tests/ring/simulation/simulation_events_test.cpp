#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/trace_messages.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/predicted_run.hpp>
#include <annulus/ring/simulate.hpp>

#include "tests/ring/sequence_plan.hpp"

namespace annulus::ring {
namespace {

constexpr double kEndless = 1e30;
constexpr double kRate = 1e9;  // bytes per second of every link

// Links of kRate inside nodes and across, and of nodes as a whole; kernels of `flops` operations a
// second.
Prices link_prices(const std::string& transport, double flops = kEndless) {
  const KernelCost kernel{"test", CostCurve::constant(flops), 0};
  CostModel model{.source = "test",
                  .kernels = {},
                  .merge_bytes_per_second = kEndless,
                  .transports = {{transport, CostCurve::transfer(1e-15, kRate)}},
                  .transport = transport};
  model.network = CostCurve::transfer(1e-15, kRate);
  model.node_bytes_per_second = kRate;
  return {std::move(model), {{"native", kernel}, {"sdpa", kernel}, {"flash_attn2", kernel}}, {}};
}

// A rank of `ranks` that sends `bytes` to some and receives as much from some, in one exchange.
RankPlan messages_only(int rank, int ranks, const std::vector<int>& to,
                       const std::vector<int>& from, std::int64_t bytes) {
  RankPlan plan;
  plan.rank = rank;
  PlanGroup group{{"sp"}, std::vector<int>(static_cast<std::size_t>(ranks)), rank};
  std::iota(group.ranks.begin(), group.ranks.end(), 0);
  plan.groups = {group};
  Exchange exchange;
  for (const int peer : to) exchange.sends.push_back({peer, rank, 0, {}, bytes});
  for (const int peer : from) exchange.receives.push_back({peer, peer, 0, {}, bytes});
  plan.tasks.push_back({std::move(exchange), 0, {}});
  return plan;
}

std::vector<RankTimeline> play(const std::vector<RankPlan>& ranks, const Prices& prices) {
  Simulation simulation(prices, "a plan by hand");
  for (const RankPlan& rank : ranks) simulation.add(rank);
  return simulation.run();
}

constexpr std::int64_t kBytes = 1'000'000'000;  // a second over one link

TEST(SimulationEvents, MessagesFromOneRankShareItsLink) {
  for (const char* transport : {"peer", "nccl", "mpi"}) {
    const Prices prices = link_prices(transport);
    // One after another they would end at 1 and 2.
    const auto shared =
        play({messages_only(0, 3, {1, 2}, {}, kBytes), messages_only(1, 3, {}, {0}, kBytes),
              messages_only(2, 3, {}, {0}, kBytes)},
             prices);
    EXPECT_NEAR(shared[1].finish, 2, 1e-9) << transport;
    EXPECT_NEAR(shared[2].finish, 2, 1e-9) << transport;
    const auto apart =
        play({messages_only(0, 4, {1}, {}, kBytes), messages_only(1, 4, {}, {0}, kBytes),
              messages_only(2, 4, {3}, {}, kBytes), messages_only(3, 4, {}, {2}, kBytes)},
             prices);
    for (const RankTimeline& rank : apart) EXPECT_NEAR(rank.finish, 1, 1e-9) << transport;
  }
}

TEST(SimulationEvents, WhoeverLeavesALinkMakesTheOthersFaster) {
  std::vector<RankPlan> ranks{messages_only(0, 3, {1, 2}, {}, kBytes),
                              messages_only(1, 3, {}, {0}, kBytes),
                              messages_only(2, 3, {}, {0}, kBytes)};
  auto& exchange = std::get<Exchange>(ranks[0].tasks[0].work);
  exchange.sends[0].bytes = kBytes / 2;
  std::get<Exchange>(ranks[1].tasks[0].work).receives[0].bytes = kBytes / 2;
  const auto timelines = play(ranks, link_prices("peer"));
  EXPECT_NEAR(timelines[1].finish, 1, 1e-9);    // half of it at half the rate
  EXPECT_NEAR(timelines[2].finish, 1.5, 1e-9);  // the other half at full rate
}

TEST(SimulationEvents, MessagesToOneRankFollowEachOther) {
  const auto timelines =
      play({messages_only(0, 3, {}, {1, 2}, kBytes), messages_only(1, 3, {0}, {}, kBytes),
            messages_only(2, 3, {0}, {}, kBytes)},
           link_prices("peer"));
  EXPECT_NEAR(timelines[1].finish, 1, 1e-9);
  EXPECT_NEAR(timelines[0].finish, 2, 1e-9);
  EXPECT_NEAR(timelines[0].transfer, 2, 1e-9);
}

TEST(SimulationEvents, TheRanksOfANodeShareItsNetwork) {
  const std::vector<RankPlan> ranks{
      messages_only(0, 4, {2}, {}, kBytes), messages_only(1, 4, {3}, {}, kBytes),
      messages_only(2, 4, {}, {0}, kBytes), messages_only(3, 4, {}, {1}, kBytes)};
  Prices prices = link_prices("nccl");
  EXPECT_NEAR(play(ranks, prices)[2].finish, 1, 1e-9);  // all on one node
  prices.node_of_rank = {0, 0, 1, 1};
  EXPECT_NEAR(play(ranks, prices)[2].finish, 2, 1e-9);
  prices.model.node_bytes_per_second = 2 * kRate;
  EXPECT_NEAR(play(ranks, prices)[2].finish, 1, 1e-9);
  prices.model.network = CostCurve::transfer(1e-15, kRate / 3);
  EXPECT_NEAR(play(ranks, prices)[2].finish, 3, 1e-9);
  // A rank that is left out loads the network too.
  prices = link_prices("nccl");
  prices.node_of_rank = {0, 0, 1, 1};
  EXPECT_NEAR(play({ranks[0], ranks[2]}, prices)[1].finish, 2, 1e-9);
}

// NCCL's grouped messages move together, so one whose sender is busy or late holds up no other.
TEST(SimulationEvents, MessagesFromOtherNodesMoveAtTheSameTime) {
  const std::vector<RankPlan> ranks{
      messages_only(0, 4, {}, {1, 2}, kBytes), messages_only(1, 4, {0, 3}, {}, kBytes),
      messages_only(2, 4, {0}, {}, kBytes), messages_only(3, 4, {}, {1}, kBytes)};
  Prices prices = link_prices("nccl");
  prices.model.node_bytes_per_second = kEndless;
  // Inside a node, the second message to rank 0 waits for the first, which shares its sender's
  // link.
  EXPECT_NEAR(play(ranks, prices)[0].finish, 3, 1e-9);
  prices.node_of_rank = {0, 1, 2, 3};
  EXPECT_NEAR(play(ranks, prices)[0].finish, 2, 1e-9);
  // Ranks that are left out send together.
  EXPECT_NEAR(play({ranks[0]}, prices)[0].finish, 2, 1e-9);
}

TEST(SimulationEvents, MessagesInsideANodePassThoseAcross) {
  const std::vector<RankPlan> ranks{messages_only(0, 4, {}, {1, 2}, kBytes),
                                    messages_only(1, 4, {0}, {}, kBytes),
                                    messages_only(2, 4, {0}, {}, kBytes)};
  Prices prices = link_prices("peer");
  EXPECT_NEAR(play(ranks, prices)[0].finish, 2, 1e-9);
  prices.node_of_rank = {0, 0, 1, 1};
  prices.model.node_bytes_per_second = 2 * kRate;
  EXPECT_NEAR(play(ranks, prices)[0].finish, 1, 1e-9);
}

// Every rank gets two messages from the other node, one after the other, whatever the hop.
TEST(SimulationEvents, ARingOverTwoNodesIsBoundByTheirNetwork) {
  const PlanOptions options{.direct = true, .prefetch_bytes = std::int64_t{1} << 30};
  AttentionProblem problem = unmasked_problem(4096);
  const Plan plan = sequence_plan(problem, 4, LayoutKind::contiguous, Schedule::ring, options);
  const double hop =
      static_cast<double>(plan.ranks[0].all<Exchange>()[0]->receives.at(0).bytes) / kRate;
  Prices prices = link_prices("peer");
  EXPECT_NEAR(predicted_seconds(plan, prices), 3 * hop, 1e-6 * hop);
  prices.node_of_rank = {0, 0, 1, 1};
  EXPECT_NEAR(predicted_seconds(plan, prices), 4 * hop, 0.2 * hop);
  prices.model.node_bytes_per_second = 10 * kRate;
  EXPECT_LT(predicted_seconds(plan, prices), 3.01 * hop);
}

struct Played {
  Schedule schedule;
  PlanOptions options;
};

// One of each kind for four ranks.
std::vector<Played> all_schedules() {
  PlanOptions pairs;
  pairs.ulysses_degree = pairs.inner_size = 2;
  PlanOptions groups;
  groups.head_group_bytes = 1;  // every head by itself
  return {{Schedule::ring, {}},        {Schedule::allgather, {}}, {Schedule::ulysses, {}},
          {Schedule::ulysses, groups}, {Schedule::hybrid, pairs}, {Schedule::double_ring, pairs},
          {Schedule::pass_q, {}}};
}

AttentionProblem full_problem(std::int64_t rows, std::int64_t columns) {
  AttentionProblem problem = unmasked_problem(columns, 8, 8);
  problem.shape.query_length = rows;
  return problem;
}

// The time of a rank's messages, exchange after exchange.
double seconds_of_exchanges(const RankPlan& rank, const CostModel& model) {
  double seconds = 0;
  for (const Exchange* exchange : rank.all<Exchange>()) {
    std::vector<double> bytes;
    for (const Transfer& transfer : exchange->receives) {
      bytes.push_back(static_cast<double>(transfer.bytes));
    }
    seconds += model.transfer_seconds(bytes);
  }
  return seconds;
}

TEST(SimulationEvents, AllSchedulesTakeTheirMessagesAndTheirComputation) {
  for (const std::int64_t rows : {4096, 64}) {
    const AttentionProblem problem = full_problem(rows, 4096);
    const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::contiguous);
    for (const Played& played : all_schedules()) {
      const PlanInput input = native_input(problem, operands, played.options);
      const Plan plan = make_plan(input, played.schedule);
      for (const char* transport : {"mpi", "nccl", "peer"}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name_of(played.schedule), rows, transport));
        Prices prices = link_prices(transport);
        const auto moved = simulate(plan, prices);
        for (std::size_t r = 0; r < 4; ++r) {
          const double messages = seconds_of_exchanges(plan.ranks[r], prices.model);
          ASSERT_GT(messages, 0);
          EXPECT_NEAR(moved[r].finish, messages, 1e-6 * messages);
          EXPECT_NEAR(moved[r].transfer, messages, 1e-6 * messages);
          EXPECT_LT(moved[r].compute, 1e-6 * messages);
        }
        // Computation of about as long, in whatever order.
        prices = link_prices(transport, plan.ranks[0].work() * 4 * 64 / moved[0].finish);
        prices.model.merge_bytes_per_second = 10 * kRate;
        for (const RankTimeline& rank : simulate(plan, prices)) {
          EXPECT_GT(rank.compute, 0.9 * moved[0].finish);
          EXPECT_GE(rank.finish, rank.compute);
          EXPECT_LE(rank.finish, (rank.compute + moved[0].finish) * (1 + 1e-9));
        }
      }
    }
  }
}

// The times before and after a rank's messages, in numbers.
TEST(SimulationEvents, HeadsGoOutAndResultsComeBack) {
  const AttentionProblem problem = full_problem(4096, 4096);
  const Plan plan =
      make_plan(native_input(problem, sequence_operands(problem, 4, LayoutKind::contiguous)),
                Schedule::ulysses);
  const RankPlan& rank = plan.ranks[0];
  ASSERT_EQ(rank.all<Exchange>().size(), 2U);
  Prices prices = link_prices("peer", rank.work() * 4 * 64);  // a second
  prices.model.transports.at("peer") = CostCurve::constant(1);
  const auto timelines = simulate(plan, prices);
  EXPECT_NEAR(timelines[0].finish, 3, 1e-6);
  EXPECT_NEAR(timelines[0].exposed, 2, 1e-6);
  EXPECT_NEAR(timelines[0].transfer, 2, 1e-6);
}

// Groups of heads: the messages of one pass while another is computed.
TEST(SimulationEvents, GroupsOfHeadsOverlap) {
  const AttentionProblem problem = full_problem(4096, 4096);
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::contiguous);
  const PlanOptions options{.head_group_bytes = 1};
  const Plan plan = make_plan(native_input(problem, operands, options), Schedule::ulysses);
  ASSERT_EQ(plan.ranks[0].all<Block>().size(), 2U);
  Prices prices = link_prices("peer", plan.ranks[0].work() * 4 * 64 / 2);  // a second each
  prices.model.transports.at("peer") = CostCurve::constant(1);
  // Heads arrive at 1 and 2, are computed by 2 and 3, and the results arrive at 3 and 4.
  for (const RankTimeline& rank : simulate(plan, prices)) EXPECT_NEAR(rank.finish, 4, 1e-6);
}

// Queries go to all ranks, and partial results come back to be combined.
TEST(SimulationEvents, QueriesGoOutAndPartsComeBack) {
  const AttentionProblem problem = full_problem(4, 4096);
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::contiguous);
  const Plan plan = make_plan(native_input(problem, operands), Schedule::pass_q);
  Prices prices = link_prices("peer", plan.ranks[0].work() * 4 * 64);
  prices.model.transports.at("peer") = CostCurve::constant(1);
  prices.model.launch_seconds = 0.5;  // of packing, of taking the own part, of combining
  const auto timelines = simulate(plan, prices);
  EXPECT_NEAR(timelines[0].compute, 2.5, 1e-6);
  // The own part is taken while the others' arrive.
  EXPECT_NEAR(timelines[0].finish, 0.5 + 1 + 1 + 1 + 0.5, 1e-6);
}

// A ring sends everything to the other node hop by hop, a double ring once. If columns come
// straight from their owners, each goes there once for every rank.
TEST(SimulationEvents, ADoubleRingSparesTheNetwork) {
  const AttentionProblem problem = full_problem(8192, 8192);
  const ShardedOperands operands = sequence_operands(problem, 8, LayoutKind::contiguous);
  Prices prices = link_prices("peer");
  prices.model.transports.at("peer") = CostCurve::transfer(1e-15, 1000 * kRate);
  prices.node_of_rank = {0, 0, 0, 0, 1, 1, 1, 1};
  const auto finish = [&](Schedule schedule, bool direct) {
    const PlanOptions options{
        .direct = direct, .prefetch_bytes = std::int64_t{1} << 30, .inner_size = 4};
    return predicted_seconds(make_plan(native_input(problem, operands, options), schedule), prices);
  };
  const double shard = 1024.0 * 8 * (64 + 64) * 2 / kRate;
  EXPECT_NEAR(finish(Schedule::ring, false), 7 * shard, 0.1 * shard);
  EXPECT_NEAR(finish(Schedule::ring, true), 16 * shard, 0.1 * shard);
  for (const bool direct : {false, true}) {
    EXPECT_NEAR(finish(Schedule::double_ring, direct), 4 * shard, 0.1 * shard) << direct;
  }
}

TEST(SimulationEvents, TransportsOnMultiprocessorsSlowKernelsDown) {
  const PlanOptions options{.prefetch_bytes = std::int64_t{1} << 30};
  AttentionProblem problem = unmasked_problem(4096);
  const Plan plan = sequence_plan(problem, 2, LayoutKind::contiguous, Schedule::ring, options);
  const Block& block = *plan.ranks[0].all<Block>().at(0);
  const double flops = plan.ranks[0].flops(block);  // blocks of a second
  for (const auto& [transport, expected] : {std::pair{"nccl", 2.25}, {"peer", 2.0}}) {
    Prices prices = link_prices(transport, flops);
    prices.model.transports.at(transport) = CostCurve::constant(0.5);
    prices.model.transfer_share = 0.5;
    // The message is there after half a second, in which only a quarter of the block is done.
    const RankTimeline timeline = simulate(plan, prices)[0];
    EXPECT_NEAR(timeline.finish, expected, 1e-9) << transport;
    EXPECT_NEAR(timeline.compute, expected, 1e-9) << transport;
    EXPECT_NEAR(timeline.exposed, 0, 1e-9) << transport;
  }
}

TEST(SimulationEvents, CompositeSlowsKernelsDownOnlyBetweenNodes) {
  const PlanOptions options{.prefetch_bytes = std::int64_t{1} << 30};
  AttentionProblem problem = unmasked_problem(4096);
  const Plan plan = sequence_plan(problem, 2, LayoutKind::contiguous, Schedule::ring, options);
  const double flops = plan.ranks[0].flops(*plan.ranks[0].all<Block>().at(0));
  Prices prices = link_prices("peer", flops);
  prices.model.use_transport("composite");
  prices.model.transports.at("peer") = CostCurve::constant(0.5);
  prices.model.network = CostCurve::constant(0.25);
  prices.model.transfer_share = 0.5;
  EXPECT_NEAR(predicted_seconds(plan, prices), 2, 1e-9);
  prices.node_of_rank = {0, 1};
  EXPECT_NEAR(predicted_seconds(plan, prices), 2.125, 1e-9);
}

TEST(SimulationEvents, CompositeEndsWithBothItsParts) {
  // Rank 0 sends to its node and to the other one, and has to wait for both.
  const std::vector<RankPlan> ranks{messages_only(0, 3, {1, 2}, {}, kBytes),
                                    messages_only(1, 3, {}, {0}, kBytes),
                                    messages_only(2, 3, {}, {0}, kBytes)};
  Prices prices = link_prices("peer");
  prices.model.use_transport("composite");
  prices.model.network = CostCurve::transfer(1e-15, kRate / 3);
  prices.node_of_rank = {0, 0, 1};
  const std::vector<RankTimeline> timelines = play(ranks, prices);
  EXPECT_NEAR(timelines[1].finish, 1, 1e-9);
  EXPECT_NEAR(timelines[2].finish, 3, 1e-9);
  EXPECT_NEAR(timelines[0].finish, 3, 1e-9);
}

TEST(Stragglers, AreDrawnByRankAndSeed) {
  const Stragglers stragglers{7, 0.1};
  double least = 2;
  double most = 0;
  for (int rank = 0; rank < 1000; ++rank) {
    const double factor = stragglers.factor(rank);
    EXPECT_EQ(factor, (Stragglers{7, 0.1}.factor(rank)));
    least = std::min(least, factor);
    most = std::max(most, factor);
  }
  EXPECT_GE(least, 1);
  EXPECT_LT(least, 1.001);
  EXPECT_GT(most, 1.099);
  EXPECT_LE(most, 1.1);
  EXPECT_NE(stragglers.factor(3), (Stragglers{8, 0.1}.factor(3)));
  EXPECT_EQ((Stragglers{7, 0}.factor(3)), 1);
}

TEST(Stragglers, SlowTheirComputationDownAndWhoWaitsForThem) {
  const Plan plan = sequence_plan(causal_problem(4096), 4, LayoutKind::zigzag, Schedule::ring);
  const Prices prices = link_prices("mpi", 1e12);
  const Stragglers stragglers{1, 0.5};
  const auto even = simulate(plan, prices);
  Simulation simulation(prices, "a plan by hand", stragglers);
  for (const RankPlan& rank : plan.ranks) simulation.add(rank);
  const auto uneven = simulation.run();
  for (std::size_t r = 0; r < even.size(); ++r) {
    EXPECT_NEAR(uneven[r].compute, even[r].compute * stragglers.factor(static_cast<int>(r)),
                1e-9 * even[r].compute);
    EXPECT_GE(uneven[r].finish, uneven[r].compute * (1 - 1e-12));
  }
}

TEST(SimulationEvents, AnErrorNamesThePlanThatWaitsForever) {
  const Prices prices = link_prices("mpi");
  try {
    static_cast<void>(
        play({messages_only(0, 2, {}, {1}, kBytes), messages_only(1, 2, {}, {}, 0)}, prices));
    FAIL() << "no error";
  } catch (const InternalError& error) {
    EXPECT_NE(std::string(error.what())
                  .find("a plan by hand, in which rank 0 has computed 0 of 0 steps and done 0 of 1 "
                        "exchanges along sp"),
              std::string::npos)
        << error.what();
  }
}

TEST(SimulationEvents, SpansShowWhatRanksDid) {
  const Plan plan = sequence_plan(causal_problem(4096), 3, LayoutKind::zigzag, Schedule::ring);
  const Prices prices = link_prices("mpi", 1e12);
  Simulation simulation(prices, "a plan by hand");
  for (const RankPlan& rank : plan.ranks) simulation.add(rank, rank.rank != 1);
  const auto timelines = simulation.run();
  EXPECT_TRUE(simulation.spans(1).empty());
  TraceOfRanks trace(3);
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    trace[rank] = simulation.spans(rank);
    double computing = 0;
    std::int64_t bytes = 0;
    std::int64_t end = 0;
    std::vector<std::pair<std::int64_t, std::int64_t>> compute;
    for (const TraceSpan& span : trace[rank]) {
      EXPECT_LE(span.begin_ns, span.end_ns);
      end = std::max(end, span.end_ns);
      const double seconds = static_cast<double>(span.end_ns - span.begin_ns) * 1e-9;
      if (span.label.category == TraceCategory::transfer) {
        EXPECT_EQ(span.stream, "communication");
        ASSERT_EQ(span.label.messages.size(), 1U);
        if (span.label.messages[0].incoming) bytes += span.label.messages[0].bytes;
        continue;
      }
      EXPECT_EQ(span.stream, "compute");
      compute.emplace_back(span.begin_ns, span.end_ns);
      if (span.label.category != TraceCategory::wait) computing += seconds;
      if (span.label.category == TraceCategory::kernel) {
        EXPECT_EQ(span.label.name, "native");
      }
    }
    EXPECT_NEAR(computing, timelines[rank].compute, 1e-7);
    EXPECT_EQ(bytes, plan.ranks[rank].bytes_received());
    EXPECT_NEAR(static_cast<double>(end) * 1e-9, timelines[rank].finish, 1e-7);
    // Computing and waiting follow each other without gaps.
    for (std::size_t i = 1; i < compute.size(); ++i) {
      EXPECT_EQ(compute[i].first, compute[i - 1].second);
    }
  }
  // The other messages have a side that was not recorded.
  std::size_t between = 0;
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) {
    for (const Exchange* exchange : plan.ranks[rank].all<Exchange>()) {
      for (const Transfer& transfer : exchange->receives) between += transfer.peer != 1 ? 1 : 0;
    }
  }
  EXPECT_GT(between, 0U);
  EXPECT_EQ(flows_of(trace).size(), between);
}

TEST(SimulationEvents, MessagesThatNobodySendsAreAnError) {
  EXPECT_THROW((void)play({messages_only(0, 2, {}, {}, 1), messages_only(1, 2, {}, {0}, 1)},
                          link_prices("peer")),
               InternalError);
}

// Messages of one exchange cost the larger of two times of the model: one
// after the other, or one message of all their bytes.
TEST(SimulationEvents, MessagesOfAnExchangeCostWhatTheModelSays) {
  const CostCurve falling_rate({{1e6, 2e-3}, {2e6, 9e-3}, {4e6, 40e-3}}, "test");
  for (const char* transport : {"peer", "nccl", "mpi"}) {
    for (const CostCurve& curve :
         {CostCurve::transfer(1e-3, kRate), CostCurve::constant(1e-3), falling_rate}) {
      for (const bool across : {false, true}) {
        Prices prices = link_prices(transport);
        (across ? prices.model.network : prices.model.transports.at(transport)) = curve;
        prices.model.node_bytes_per_second = kEndless;
        if (across) prices.node_of_rank = {0, 1, 2};
        const auto timelines =
            play({messages_only(0, 3, {}, {1, 2}, 1'500'000),
                  messages_only(1, 3, {0}, {}, 1'500'000), messages_only(2, 3, {0}, {}, 1'500'000)},
                 prices);
        const std::vector<double> both{1.5e6, 1.5e6};
        EXPECT_NEAR(timelines[0].finish, prices.model.transfer_seconds(both, across), 1e-12)
            << transport << across;
      }
    }
  }
}

// The rank that sends a gradient goes on fetching keys while its neighbour is slow to take it.
TEST(SimulationEvents, ASlowGradientDelaysNoPrefetch) {
  AttentionProblem problem = unmasked_problem(4096, 8, 8);
  PlanInput input = native_input(problem, sequence_operands(problem, 8, LayoutKind::contiguous));
  input.backward = BackwardRequest{};
  Plan plan = make_plan(input, Schedule::ring);
  const auto first_gradient = [&](int rank, std::vector<Transfer> Exchange::*side) {
    for (Task& task : plan.ranks[static_cast<std::size_t>(rank)].tasks) {
      auto* const exchange = std::get_if<Exchange>(&task.work);
      if (exchange == nullptr || (exchange->*side).empty()) continue;
      Transfer& transfer = (exchange->*side).front();
      const RankPlan& of = plan.ranks[static_cast<std::size_t>(rank)];
      if (is_gradient(of.buffer(transfer.buffer).contents.front())) return &transfer;
    }
    return static_cast<Transfer*>(nullptr);
  };
  Transfer* const sent = first_gradient(0, &Exchange::sends);
  ASSERT_NE(sent, nullptr);
  Transfer* const received = first_gradient(sent->peer, &Exchange::receives);
  ASSERT_EQ(received->peer, 0);
  sent->bytes = received->bytes = kBytes;
  for (const char* transport : {"peer", "nccl"}) {
    const Prices prices = link_prices(transport);
    Simulation simulation(prices, "a ring");
    for (const RankPlan& rank : plan.ranks) simulation.add(rank, true);
    (void)simulation.run();
    const std::vector<TraceSpan>& spans = simulation.spans(0);
    const auto slow = std::ranges::find_if(spans, [](const TraceSpan& span) {
      return span.label.messages.size() == 1 && span.label.messages[0].bytes == kBytes;
    });
    ASSERT_NE(slow, spans.end());
    ASSERT_FALSE(slow->label.messages[0].incoming);
    const auto fetched = std::ranges::count_if(spans, [&](const TraceSpan& span) {
      return span.label.messages.size() == 1 && span.label.messages[0].incoming &&
             span.label.messages[0].bytes < kBytes && span.begin_ns > slow->begin_ns &&
             span.end_ns < slow->end_ns;
    });
    // Both directions of a two-sided exchange end together.
    EXPECT_EQ(fetched > 0, std::string(transport) == "peer") << transport << " " << fetched;
  }
}

TEST(SimulationEvents, CopiesThatFollowEachOtherAreLaunchedOnce) {
  const Plan plan = sequence_plan(causal_problem(4096), 2, LayoutKind::zigzag, Schedule::ulysses);
  const RankPlan& rank = plan.ranks[0];
  int launches = 0;
  bool after_copy = false;
  for (const Task& task : rank.tasks) {
    const bool copy = std::holds_alternative<Copy>(task.work);
    if (copy && !(after_copy && task.after.empty())) ++launches;
    if (std::holds_alternative<Reduce>(task.work)) ++launches;
    after_copy = copy;
  }
  ASSERT_GE(launches, 2);
  ASSERT_LT(launches, static_cast<int>(rank.all<Copy>().size()));
  Prices prices = link_prices("peer");
  const double before = simulate(plan, prices)[0].compute;
  prices.model.launch_seconds = 1;
  EXPECT_NEAR(simulate(plan, prices)[0].compute, before + launches, 1e-6);
}

// Whole nodes stand for the others, so that the network is shared as in the whole mesh.
TEST(Planner, SomeNodesPredictTheWholeMesh) {
  AttentionProblem problem = unmasked_problem(1 << 15);
  const ShardedOperands operands = sequence_operands(problem, 32, LayoutKind::contiguous);
  for (const bool direct : {false, true}) {
    PlanInput input = native_input(problem, operands, {.direct = direct});
    input.prices = link_prices("nccl", 1e13);
    for (int rank = 0; rank < 32; ++rank) input.prices.node_of_rank.push_back(rank / 4);
    const std::vector<int> sample = simulated_ranks(input, 0, 15);
    ASSERT_EQ(sample.size(), 12U);
    for (std::size_t i = 0; i < sample.size(); ++i) {
      EXPECT_EQ(sample[i] % 4, static_cast<int>(i % 4));
    }
    const double all = predicted_seconds(make_plan(input, Schedule::ring), input.prices);
    const double some = predicted_seconds(make_plan(input, Schedule::ring, sample), input.prices);
    EXPECT_NEAR(some, all, 0.03 * all) << direct;
  }
}

}  // namespace
}  // namespace annulus::ring
