#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/balance.hpp>
#include <annulus/ring/planner.hpp>

#include "balance/assign_chunks.hpp"
#include "schedules/building/kv_needs.hpp"
#include "tests/attention/flash/host_lists.hpp"
#include "tests/ring/plan_player.hpp"
#include "tests/ring/sequence_plan.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::ring {
namespace {

using ::testing::HasSubstr;

constexpr double kMaximumUneven = 0.03;

// Log-normal lengths, the same on every machine.
std::vector<std::int32_t> documents(std::int64_t length, int count, double sigma, unsigned seed) {
  std::mt19937 random(seed);
  const auto uniform = [&] { return (static_cast<double>(random()) + 1) / 4294967297.0; };
  std::vector<double> sizes;
  for (int i = 0; i < count; ++i) {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    sizes.push_back(std::exp(sigma * radius * std::cos(2 * std::numbers::pi * uniform())));
  }
  const double total = std::accumulate(sizes.begin(), sizes.end(), 0.0);
  std::vector<std::int32_t> cu_seqlens{0};
  double sum = 0;
  for (const double size : sizes) {
    sum += size;
    cu_seqlens.push_back(
        static_cast<std::int32_t>(std::lround(sum / total * static_cast<double>(length))));
  }
  return cu_seqlens;
}

Mask packed(std::int64_t length, int count, double sigma, unsigned seed) {
  Mask mask;
  const auto ids = segments_from_cu_seqlens(documents(length, count, sigma, seed), length);
  mask.set_segments(1, ids, ids);
  return mask;
}

AttentionProblem problem_of(std::int64_t length, const Mask& mask) {
  AttentionProblem problem = causal_problem(length);
  problem.mask = mask;
  return problem;
}

std::vector<Mask> masks_of(std::int64_t length) {
  std::vector<Mask> masks(4);
  masks[0].set_causal(true);
  masks[1].set_window(4096, 0);
  masks[2].set_window(1000, 1000);
  masks[3].set_query_lengths({static_cast<std::int32_t>(length / 2)});
  masks[3].set_kv_lengths({static_cast<std::int32_t>(length / 3)});
  masks[3].set_causal(true);
  for (int part = 0; part < 3; ++part) {  // positions that one band does not describe
    Mask& mask = masks.emplace_back();
    mask.set_causal(true);
    if (part == 0) mask.set_prefix(length / 4);
    if (part == 1) mask.set_chunk(4096);
    if (part != 2) continue;
    mask.set_sink_tokens(64);
    mask.set_window(4096, -1);
  }
  for (const double density : {0.06, 0.5}) {
    for (const bool causal : {false, true}) {
      Mask& mask = masks.emplace_back();
      mask.set_causal(causal);
      mask.set_block_mask(BlockMask::random(length, length, 1, density, 3));
    }
  }
  masks.emplace_back().set_block_mask(BlockMask::strided(length, length, 4, 16));
  for (const int count : {1, 2, 5, 32, 300, 2000}) {
    for (const double sigma : {0.5, 1.0, 2.0}) {
      for (unsigned seed = 1; seed <= 3; ++seed) {
        Mask mask = packed(length, count, sigma, seed);
        if (seed == 1) masks.push_back(mask);
        mask.set_causal(true);
        masks.push_back(std::move(mask));
      }
    }
  }
  return masks;
}

// Sizes differ by at most a granule, cuts lie between granules, and the ranges are few.
void expect_regular(const Assignment& assignment, std::int64_t granule) {
  std::int64_t least = assignment.length();
  std::int64_t most = 0;
  std::size_t ranges = 0;
  for (int rank = 0; rank < assignment.ranks(); ++rank) {
    const PositionRanges& held = assignment.positions(rank);
    least = std::min(least, held.size());
    most = std::max(most, held.size());
    ranges += held.ranges().size();
    for (const PositionRange& range : held.ranges()) {
      EXPECT_EQ(range.start.value() % granule, 0);
      const std::int64_t end = range.last().value() + 1;
      EXPECT_TRUE(end % granule == 0 || end == assignment.length());
    }
  }
  EXPECT_LE(most - least, granule);
  EXPECT_LT(ranges, 6 * static_cast<std::size_t>(assignment.ranks()));
}

double imbalance_of(const AttentionProblem& problem, const Distribution& rows, int ranks) {
  const NamedSharding query(MeshShape({{"sp", ranks}}), PartitionSpec::parse("-,sp"),
                            {problem.shape.batch, problem.shape.query_length},
                            {Distribution::block(), rows});
  return tile_imbalance(problem, query).value();
}

TEST(Balance, RanksGetTheSameTilesAndRows) {
  // 32768 on 8 ranks are 32 chunks each; 100001 is a prime's neighbour, and ragged.
  for (const std::int64_t length : {131072, 100001, 32768}) {
    for (const Mask& mask : masks_of(length)) {
      const AttentionProblem problem = problem_of(length, mask);
      for (const int ranks : {2, 3, 4, 8}) {
        SCOPED_TRACE(testing::Message() << to_string(mask) << " of " << length << " on " << ranks);
        const Assignment assignment = assign_rows(problem, {ranks, 1});
        ASSERT_EQ(assignment.length(), length);
        ASSERT_EQ(assignment.ranks(), ranks);
        expect_regular(assignment, 128);
        EXPECT_LT(imbalance_of(problem, Distribution::assigned(assignment), ranks), kMaximumUneven);
      }
    }
  }
}

TEST(Balance, IsWorthIt) {
  const Mask mask = [] {
    Mask documents = packed(131072, 32, 1.0, 1);
    documents.set_causal(true);
    return documents;
  }();
  const AttentionProblem problem = problem_of(131072, mask);
  for (const int ranks : {2, 4, 8}) {
    EXPECT_GT(imbalance_of(problem, Distribution::sequence(LayoutKind::zigzag), ranks), 0.1);
    EXPECT_GT(imbalance_of(problem, Distribution::sequence(LayoutKind::contiguous), ranks), 0.1);
  }
}

// Key tiles that a rank's flash kernel visits in its blocks, times query heads.
double tiles_of(const RankPlan& rank, const Mask& mask) {
  double tiles = 0;
  for (const Block* block : rank.all<Block>()) {
    const flash::ListPlan plan(mask, {}, block->row_positions, block->column_positions, 128, 128);
    for (const flash::QueryTile& tile : flash::make_lists(plan).tiles) {
      tiles += static_cast<double>(tile.key_tiles * block->heads.count);
    }
  }
  return tiles;
}

// Tiles start afresh with each block, row range and column range, so there are somewhat more than
// were assigned, most of all with short documents.
TEST(Balance, HoldsForTheTilesThatKernelsVisit) {
  for (const int count : {5, 32, 300, 2000}) {
    Mask mask = packed(131072, count, 1.0, 5);
    mask.set_causal(true);
    const AttentionProblem problem = problem_of(131072, mask);
    for (const int ranks : {2, 4, 8}) {
      SCOPED_TRACE(testing::Message() << count << " documents on " << ranks);
      const ShardedOperands operands = sequence_operands(problem, ranks, LayoutKind::balanced);
      const Plan plan = make_plan(flash_input(problem, operands), Schedule::ring);
      double most = 0;
      double sum = 0;
      for (const RankPlan& rank : plan.ranks) {
        const double tiles = tiles_of(rank, mask);
        most = std::max(most, tiles);
        sum += tiles;
      }
      EXPECT_LT(most * ranks / sum - 1, 2 * kMaximumUneven);
    }
  }
}

TEST(Balance, OfACausalMaskIsZigzag) {
  Mask mask;
  mask.set_causal(true);
  for (const int ranks : {2, 4, 8}) {
    const Assignment assignment = assign_rows(problem_of(65536, mask), {ranks, 1});
    const SequenceLayout zigzag(LayoutKind::zigzag, 65536, ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      const PositionRanges expected = zigzag.positions(rank);
      // The middle ranges of zigzag's last rank are neighbours.
      EXPECT_EQ(assignment.positions(rank).size(), expected.size());
      EXPECT_EQ(assignment.positions(rank).ranges().front().start, expected.ranges().front().start);
      EXPECT_EQ(assignment.positions(rank).ranges().back().last(), expected.ranges().back().last());
      EXPECT_LE(assignment.positions(rank).ranges().size(), 2U);
    }
  }
}

TEST(Balance, OfEvenWorkIsContiguous) {
  for (const int ranks : {2, 3, 5, 8}) {
    const Assignment assignment = assign_rows(problem_of(128 * 8 * ranks, {}), {ranks, 1});
    const SequenceLayout contiguous(LayoutKind::contiguous, 128 * 8 * ranks, ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(assignment.positions(rank), contiguous.positions(rank));
    }
  }
}

TEST(Balance, CutsBetweenDocuments) {
  // Four equal documents on two ranks: no rank needs keys of the other.
  Mask mask;
  std::vector<std::int32_t> cu{0, 8192, 16384, 24576, 32768};
  const auto ids = segments_from_cu_seqlens(cu, 32768);
  mask.set_segments(1, ids, ids);
  mask.set_causal(true);
  const AttentionProblem problem = problem_of(32768, mask);
  const ShardedOperands operands = sequence_operands(problem, 2, LayoutKind::balanced);
  const Plan plan = make_plan(flash_input(problem, operands), Schedule::ring);
  EXPECT_EQ(plan.imbalance(), 0);
  for (const RankPlan& rank : plan.ranks) EXPECT_EQ(rank.bytes_sent(), 0);
}

TEST(Balance, TakesTheGranuleThatIsAskedFor) {
  Mask mask = packed(4099, 7, 1.0, 2);
  for (const std::int64_t granule : {1, 2, 16, 100, 128, 1024, 8192}) {
    for (const int ranks : {1, 2, 3, 7, 50}) {
      SCOPED_TRACE(testing::Message() << granule << " on " << ranks);
      const Assignment assignment = assign_rows(problem_of(4099, mask), {ranks, 1}, granule);
      ASSERT_EQ(assignment.length(), 4099);
      if (ranks > 1) expect_regular(assignment, granule);
    }
  }
}

TEST(Balance, OfShortSequences) {
  Mask mask;
  mask.set_causal(true);
  for (const std::int64_t length : {0, 1, 2, 7, 100, 1000}) {
    for (const int ranks : {1, 2, 3, 8, 13}) {
      const Assignment assignment = assign_rows(problem_of(length, mask), {ranks, 1});
      EXPECT_EQ(assignment.length(), length);
      EXPECT_EQ(assignment.ranks(), ranks);
      std::int64_t most = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        most = std::max(most, assignment.positions(rank).size());
      }
      EXPECT_LE(most, length / ranks + std::max<std::int64_t>(1, length / ranks / 4 + 1));
    }
  }
}

TEST(Balance, IsTheSameAgain) {
  Mask mask = packed(20000, 50, 2.0, 9);
  const Assignment first = assign_rows(problem_of(20000, mask), {6, 1});
  EXPECT_EQ(first, assign_rows(problem_of(20000, mask), {6, 1}));
  mask.set_causal(true);
  EXPECT_FALSE(first == assign_rows(problem_of(20000, mask), {6, 1}));
}

TEST(Balance, DoesJusticeToEveryShardOfTheBatch) {
  // Batch 0 has work in the first half of the rows only, batch 1 in the second half.
  AttentionProblem problem = causal_problem(16384);
  problem.shape.batch = 2;
  std::vector<std::int32_t> ids(2 * 16384, -1);
  std::fill(ids.begin(), ids.begin() + 8192, 0);
  std::fill(ids.begin() + 16384 + 8192, ids.end(), 0);
  problem.mask.set_segments(2, ids, ids);
  const Assignment assignment = assign_rows(problem, {2, 2});
  const NamedSharding query(MeshShape({{"dp", 2}, {"sp", 2}}), PartitionSpec::parse("dp,sp"),
                            {2, 16384},
                            {Distribution::block(), Distribution::assigned(assignment)});
  EXPECT_LT(tile_imbalance(problem, query).value(), kMaximumUneven);
}

TEST(Balance, KeysOfTheirOwnAreAssignedByTheRowsThatSeeThem) {
  // 1000 queries see the first 2000 of 8000 keys: every rank holds 500 of them.
  AttentionProblem problem;
  problem.shape = {1, 1000, 8000, 2, 1, 8, 8};
  problem.mask.set_kv_lengths({2000});
  const Assignment keys = assign_columns(problem, {4, 1}, 10);
  expect_regular(keys, 10);
  for (int rank = 0; rank < 4; ++rank) {
    std::int64_t seen = 0;
    for (const PositionRange& range : keys.positions(rank).ranges()) {
      seen += range.count_below(GlobalPosition(2000));
    }
    EXPECT_EQ(seen, 500);
  }
}

TEST(Balance, KeysLieLikeRowsOnTheSameAxesOnly) {
  const MeshShape mesh({{"a", 2}, {"b", 2}});
  Mask mask = packed(4096, 9, 1.0, 4);
  mask.set_causal(true);
  const AttentionProblem problem = problem_of(4096, mask);
  const auto operands = [&](const AttentionProblem& of, const char* query, const char* kv) {
    return sharded_by(of, mesh, query, kv, LayoutKind::balanced);
  };
  const ShardedOperands alike = operands(problem, "-,a+b", "-,a+b");
  EXPECT_EQ(alike.query.distribution(1), alike.key.distribution(1));
  EXPECT_EQ(alike.key.distribution(1), alike.value.distribution(1));
  EXPECT_EQ(alike.query.distribution(1), alike.output.distribution(1));
  EXPECT_EQ(alike.query.distribution(1), alike.lse.distribution(2));
  const ShardedOperands apart = operands(problem, "-,a", "-,b");
  EXPECT_EQ(apart.query.distribution(1).assignment()->ranks(), 2);
  EXPECT_FALSE(apart.query.distribution(1) == apart.key.distribution(1));
  const ShardedOperands replicated = operands(problem, "-,-", "-,a+b");
  EXPECT_EQ(replicated.query.local_shape(3)[1], 4096);
  EXPECT_EQ(replicated.key.distribution(1).assignment()->ranks(), 4);
  AttentionProblem longer = problem;
  longer.mask = {};
  longer.shape.kv_length = 8192;
  EXPECT_EQ(operands(longer, "-,a+b", "-,a+b").key.distribution(1).assignment()->length(), 8192);
}

TEST(Balance, RefusesWhatItCannotAssign) {
  const AttentionProblem problem = problem_of(64, {});
  EXPECT_THAT(test::message_of<ArgumentError>([&] {
                (void)assign_rows(problem, {2, 1}, 0);
              }),
              HasSubstr("sequence granule: got 0"));
  EXPECT_THAT(test::message_of<ArgumentError>([&] {
                (void)assign_columns(problem, {2, 1}, -1);
              }),
              HasSubstr("sequence granule: got -1"));
  EXPECT_THAT(test::message_of<ArgumentError>([&] {
                (void)assign_rows(problem_of(1 << 20, {}), {2, 1}, 31);
              }),
              HasSubstr("32 or more, for at most 32768 chunks"));
  const AttentionProblem endless = problem_of(std::int64_t{1} << 28, {});
  EXPECT_EQ(assign_rows(endless, {1, 1}).ranks(), 1);
  EXPECT_THAT(test::message_of<UnsupportedError>([&] {
                (void)assign_rows(endless, {2, 1});
              }),
              HasSubstr("fewer than 268435456 positions"));
  // The sharding refuses batches that do not divide.
  const MeshShape mesh({{"dp", 2}, {"sp", 2}});
  EXPECT_THROW((void)sharded_by(problem, mesh, "dp,sp", "dp,sp", LayoutKind::balanced),
               IndivisibleError);
  EXPECT_THROW((void)sharded_by(problem, mesh, "-,x", "-,x", LayoutKind::balanced),
               UnknownAxisError);
  // Even if the specs differ, too.
  EXPECT_THROW((void)sharded_by(problem, mesh, "x,sp", "-,sp"), UnknownAxisError);
}

LayoutKind default_kind(const AttentionProblem& problem, const MeshShape& mesh,
                        LayoutOptions options = {}) {
  options.mode = AttentionMode::train;
  return default_layout(problem, mesh, options).sequence;
}

TEST(DefaultLayout, IsBalancedWhereThatIsClearlyBetter) {
  const MeshShape mesh({{"sp", 4}});
  Mask causal;
  causal.set_causal(true);
  EXPECT_EQ(default_kind(problem_of(8192, {}), mesh), LayoutKind::contiguous);
  EXPECT_EQ(default_kind(problem_of(8192, causal), mesh), LayoutKind::zigzag);
  Mask window = causal;
  window.set_window(256, 0);
  EXPECT_EQ(default_kind(problem_of(8192, window), mesh), LayoutKind::zigzag);
  Mask uneven = packed(8192, 9, 1.5, 1);
  EXPECT_EQ(default_kind(problem_of(8192, uneven), mesh), LayoutKind::balanced);
  uneven.set_causal(true);
  EXPECT_EQ(default_kind(problem_of(8192, uneven), mesh), LayoutKind::balanced);
  // Not if nothing is sharded, rows are few, or keys lie on other axes or have another length.
  EXPECT_EQ(default_kind(problem_of(8192, uneven), MeshShape({{"sp", 1}})), LayoutKind::contiguous);
  EXPECT_EQ(default_kind(problem_of(8192, uneven), MeshShape({{"sp", 64}})), LayoutKind::zigzag);
  EXPECT_EQ(default_kind(problem_of(8192, uneven), mesh, {PartitionSpec::parse("-,-"), {}, {}}),
            LayoutKind::zigzag);
  AttentionProblem longer = problem_of(8192, {});
  longer.shape.kv_length = 16384;
  longer.mask.set_kv_lengths({100});
  longer.mask.set_query_lengths({100});
  EXPECT_EQ(default_kind(longer, mesh), LayoutKind::contiguous);
  // An explicit layout is used as given.
  EXPECT_EQ(default_kind(problem_of(8192, uneven), mesh, {.layout = LayoutKind::striped}),
            LayoutKind::striped);
  EXPECT_EQ(default_kind(problem_of(8192, uneven), mesh,
                         {PartitionSpec::parse("-,x"), PartitionSpec::parse("-,x"), {}}),
            LayoutKind::contiguous);  // whose sharding names the axis that is not there
}

// An assignment with as many ranges as possible: each granule goes to a random rank.
ShardedOperands scattered(const AttentionProblem& problem, int ranks, std::int64_t granule,
                          unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<PositionRange>> held(static_cast<std::size_t>(ranks));
  const std::int64_t length = problem.shape.query_length;
  for (std::int64_t p = 0; p < length; p += granule) {
    held[random() % held.size()].push_back({GlobalPosition(p), std::min(granule, length - p), 1});
  }
  std::vector<PositionRanges> by_rank;
  for (auto& ranges : held) by_rank.emplace_back(std::move(ranges));
  const Distribution assigned = Distribution::assigned(Assignment(std::move(by_rank)));
  const MeshShape mesh({{"sp", ranks}});
  const AttentionShape& shape = problem.shape;
  const auto sharding = [&](std::int64_t heads, std::int64_t dim) {
    return NamedSharding(mesh, PartitionSpec::parse("-,sp"), {shape.batch, length, heads, dim},
                         {Distribution::block(), assigned});
  };
  return {sharding(shape.heads, shape.head_dim), sharding(shape.kv_heads, shape.head_dim),
          sharding(shape.kv_heads, shape.value_dim), sharding(shape.heads, shape.value_dim),
          NamedSharding(mesh, PartitionSpec::parse("-,-,sp"), {shape.batch, shape.heads, length},
                        {Distribution::block(), Distribution::block(), assigned})};
}

std::size_t most_messages(const Plan& plan) {
  std::size_t most = 0;
  for (const RankPlan& rank : plan.ranks) {
    for (const Exchange* exchange : rank.all<Exchange>()) {
      std::vector<std::size_t> by_origin(plan.ranks.size());
      for (const Transfer& receive : exchange->receives) {
        most = std::max(most, ++by_origin[static_cast<std::size_t>(receive.origin)]);
      }
    }
  }
  return most;
}

TEST(Messages, AreFewHoweverColumnsAreScattered) {
  Mask mask = packed(2048, 60, 1.0, 3);
  mask.set_causal(true);
  const AttentionProblem problem = problem_of(2048, mask);
  for (const int ranks : {2, 3, 5}) {
    const ShardedOperands operands = scattered(problem, ranks, 8, 11);
    ASSERT_GT(operands.key.positions(0, 1).ranges().size(), 20U);
    for (const Schedule schedule : {Schedule::ring, Schedule::allgather}) {
      for (const bool direct : {false, true}) {
        PlanOptions options = PlanOptions::for_place(Place::cuda(0));
        options.direct = direct;
        const Plan plan = make_plan(flash_input(problem, operands, options), schedule);
        const std::size_t messages = most_messages(plan);
        EXPECT_LE(messages, KvNeeds::kMaximumMessages);
        EXPECT_GT(messages, 1U);
        // One block per step, not one for each pair of ranges; more only if rows are rounded at
        // different times.
        for (const RankPlan& rank : plan.ranks) {
          EXPECT_LE(rank.all<Block>().size(), 4U * static_cast<std::size_t>(ranks));
        }
      }
    }
  }
}

TEST(Messages, BringAllThatIsSeen) {
  Mask mask = packed(96, 7, 1.0, 3);
  mask.set_causal(true);
  const AttentionProblem problem = problem_of(96, mask);
  for (const int ranks : {2, 3, 4}) {
    for (const unsigned seed : {1U, 2U, 3U}) {
      const ShardedOperands operands = scattered(problem, ranks, 1, seed);
      for (const Schedule schedule : {Schedule::ring, Schedule::allgather}) {
        for (const bool direct : {false, true}) {
          PlanInput input = native_input(problem, operands, {.direct = direct});
          expect_valid(make_plan(input, schedule), operands, seed);
          // On two nodes.
          for (int r = 0; r < ranks; ++r) input.prices.node_of_rank.push_back(r * 2 / ranks);
          expect_valid(make_plan(input, schedule), operands, seed);
        }
      }
    }
  }
}

TEST(Messages, OfBalancedRowsAreAboutAsManyAsOfZigzag) {
  for (const int count : {32, 2000}) {
    Mask mask = packed(131072, count, 1.0, 1);
    mask.set_causal(true);
    const AttentionProblem problem = problem_of(131072, mask);
    for (const int ranks : {2, 4, 8}) {
      const ShardedOperands operands = sequence_operands(problem, ranks, LayoutKind::balanced);
      const Plan plan = make_plan(flash_input(problem, operands), Schedule::ring);
      EXPECT_LE(most_messages(plan), 4U);
    }
  }
}

// The measure itself, with numbers that can be checked by hand.
TEST(TileImbalance, IsThatOfTheRankWithMost) {
  Mask mask;
  mask.set_causal(true);
  // Two ranks of 8 tile rows each: 1 + … + 8 and 9 + … + 16 tiles.
  const AttentionProblem problem = problem_of(2048, mask);
  EXPECT_DOUBLE_EQ(imbalance_of(problem, Distribution::sequence(), 2), 100.0 / 68 - 1);
  EXPECT_DOUBLE_EQ(imbalance_of(problem, Distribution::sequence(LayoutKind::zigzag), 2), 0);
  // Every rank has half of every tile.
  EXPECT_DOUBLE_EQ(imbalance_of(problem, Distribution::sequence(LayoutKind::striped), 2), 0);
  EXPECT_DOUBLE_EQ(imbalance_of(problem_of(0, {}), Distribution::sequence(), 2), 0);
}

TEST(TileImbalance, IsUnknownForEndlessSequences) {
  const AttentionProblem problem = problem_of(std::int64_t{1} << 28, {});
  const NamedSharding query(MeshShape({{"sp", 2}}), PartitionSpec::parse("-,sp"),
                            {1, problem.shape.query_length});
  EXPECT_EQ(tile_imbalance(problem, query), std::nullopt);
}

// Chunks with explicit work.
TEST(AssignChunks, GivesEveryRankItsShareOfWorkAndRows) {
  const Chunks chunks{8, 1, {{8, 0, 0, 0, 0, 0, 0, 8}}, {}};
  const Assignment assignment = assign_chunks(chunks, 2);
  for (int rank = 0; rank < 2; ++rank) {
    const PositionRanges& held = assignment.positions(rank);
    EXPECT_EQ(held.size(), 4);
    EXPECT_NE(held.local(GlobalPosition(0)).has_value(), held.local(GlobalPosition(7)).has_value());
  }
}

TEST(AssignChunks, ExchangesChunksWhereArcsAreTooCoarse) {
  // Every arc of 4 leaves at least 7 of the 12 on one side.
  const Chunks chunks{8, 1, {{5, 0, 1, 0, 5, 0, 1, 0}}, {}};
  const Chunks uneven{6, 1, {{4, 4, 1, 1, 1, 1}}, {}};
  for (const Chunks& one : {chunks, uneven}) {
    const Assignment assignment = assign_chunks(one, 2);
    std::vector<std::int64_t> work(2);
    for (int rank = 0; rank < 2; ++rank) {
      for (std::int64_t i = 0; i < one.length; ++i) {
        if (assignment.owner(GlobalPosition(i)) == rank) {
          work[static_cast<std::size_t>(rank)] += one.work[0][static_cast<std::size_t>(i)];
        }
      }
    }
    EXPECT_EQ(work[0], work[1]);
  }
}

}  // namespace
}  // namespace annulus::ring
