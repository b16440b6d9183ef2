// Where results lie and how they come together, played through with sets in place of numbers.
#include <map>
#include <set>
#include <tuple>

#include <gtest/gtest.h>

#include <annulus/ring/merge_plan.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/verification/random_problem.hpp>

namespace annulus::ring {
namespace {

// (row, head) → the blocks whose results it holds.
using Cells = std::map<std::pair<std::int64_t, std::int64_t>, std::multiset<std::size_t>>;

template <class Body>
void for_each_cell(const LocalRange& rows, const HeadRange& heads, const Body& body) {
  for (std::int64_t r = rows.begin.value(); r < rows.end().value(); ++r) {
    for (std::int64_t h = heads.begin; h < heads.begin + heads.count; ++h) {
      body(std::pair(r, h));
    }
  }
}

class MergePlayer {
 public:
  MergePlayer(const RankPlan& plan, const MergeRules& rules)
      : plan_(plan), rules_(rules), merges_(plan_merges(plan, rules)) {}

  void play() {
    Cells expected;
    std::size_t index = 0;
    for (const Step& step : plan_.steps) {
      for (const Block& block : step.blocks) {
        const BlockMerge& merge = merges_.blocks.at(index);
        if (merge.before) combine(*merge.before);
        ASSERT_LT(merge.slot, rules_.slots);
        if (merge.slot == 0) {
          ASSERT_EQ(rules_.dtype_of(block), rules_.first_dtype);
        }
        ASSERT_LE(block.heads.count, merges_.group_heads);
        for (const auto& [cell, dtype] : waiting_[merge.slot]) {
          ASSERT_EQ(dtype, rules_.dtype_of(block)) << "two dtypes in slot " << merge.slot;
        }
        for_each_cell(block.rows, block.heads, [&](const auto& cell) {
          slots_[merge.slot][cell] = {index};
          waiting_[merge.slot][cell] = rules_.dtype_of(block);
          expected[cell].insert(index);
        });
        if (merge.after) combine(*merge.after);
        ++index;
      }
    }
    ASSERT_EQ(index, merges_.blocks.size());
    for (const Combination& rest : merges_.rest) {
      EXPECT_TRUE(rest.parts.empty());
      combine(rest);
    }
    if (rules_.first_is_output) {
      // What was never combined must lie there as it is.
      for (auto& [cell, blocks] : slots_[0]) output_.try_emplace(cell, blocks);
    }
    for_each_cell({LocalPosition(0), plan_.local.query_length}, {0, plan_.local.heads},
                  [&](const auto& cell) {
                    ASSERT_TRUE(output_.contains(cell)) << cell.first << " " << cell.second;
                    EXPECT_EQ(output_[cell], expected[cell]) << cell.first << " " << cell.second;
                  });
  }

  int folds = 0;

 private:
  void combine(const Combination& combination) {
    ASSERT_LE(combination.parts.size(), static_cast<std::size_t>(rules_.most_parts));
    Cells sum;
    for_each_cell({LocalPosition(0), plan_.local.query_length}, combination.heads,
                  [&](const auto& cell) { sum[cell] = {}; });
    for (const Part& part : combination.parts) {
      for_each_cell(part.rows, part.heads, [&](const auto& cell) {
        ASSERT_TRUE(slots_[part.slot].contains(cell));
        for (const std::size_t block : slots_[part.slot][cell]) sum[cell].insert(block);
        waiting_[part.slot].erase(cell);
      });
    }
    if (combination.into != Combination::kOutput) {
      ++folds;
      ASSERT_EQ(combination.into, merges_.fold_slot);
    }
    Cells& target = combination.into == Combination::kOutput ? output_ : slots_[combination.into];
    for (auto& [cell, blocks] : sum) target[cell] = blocks;
  }

  const RankPlan& plan_;
  const MergeRules& rules_;
  MergePlan merges_;
  std::map<int, Cells> slots_;
  // The dtypes of results that wait in a slot to be combined.
  std::map<int, std::map<std::pair<std::int64_t, std::int64_t>, DType>> waiting_;
  Cells output_;
};

TEST(MergePlan, EveryResultEndsInTheOutputOnce) {
  int folds = 0;
  for (const int ranks : {1, 3, 4}) {
    for (int index = 0; index < 60; ++index) {
      const verification::RandomProblem drawn = verification::draw_problem(11, index, ranks);
      const ShardedOperands operands = shard_operands(drawn.problem, drawn.mesh, drawn.layout);
      const Schedule schedule = choose_schedule(drawn.problem, operands, drawn.schedule, drawn.plan,
                                                CostModel::cpu_core())
                                    .schedule;
      const Plan plan = make_plan(drawn.problem, operands, schedule, drawn.plan);
      for (const RankPlan& rank : plan.ranks) {
        for (const int slots : {2, 3, 8}) {
          for (const bool narrow : {false, true}) {
            SCOPED_TRACE(testing::Message() << drawn.command << " rank " << rank.rank << " slots "
                                            << slots << (narrow ? " narrow" : ""));
            MergeRules rules;
            rules.slots = slots;
            rules.most_parts = slots == 3 ? 3 : 32;
            if (narrow) {
              rules.first_dtype = DType::bfloat16;
              rules.first_is_output = true;
              // Some blocks by a kernel that gives float32.
              rules.dtype_of = [](const Block& block) {
                return block.pairs % 3 == 0 ? DType::float32 : DType::bfloat16;
              };
            }
            MergePlayer player(rank, rules);
            player.play();
            folds += player.folds;
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
  EXPECT_GT(folds, 100);
}

TEST(MergePlan, ResultsWithoutCommonRowsShareASlot) {
  RankPlan plan;
  plan.local = {1, 8, 8, 2, 2, 4, 4};
  Step step;
  for (const std::int64_t begin : {0, 4}) {
    Block block;
    block.rows = {LocalPosition(begin), 4};
    block.heads = {0, 2};
    step.blocks.push_back(block);
  }
  plan.steps = {step};
  MergeRules rules;
  rules.first_is_output = true;
  const MergePlan merges = plan_merges(plan, rules);
  EXPECT_EQ(merges.slots, 1);
  EXPECT_EQ(merges.fold_slot, -1);
  // Both lie where they belong: nothing is left to do.
  EXPECT_FALSE(merges.blocks[0].after);
  EXPECT_FALSE(merges.blocks[1].after);
  EXPECT_TRUE(merges.rest.empty());
}

}  // namespace
}  // namespace annulus::ring
