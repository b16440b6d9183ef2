#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include <annulus/ring/planner.hpp>

#include "schedules/building/group_nodes.hpp"
#include "schedules/building/kv_needs.hpp"

namespace annulus::ring {

/// The groups of ranks that share a key/value sequence: what these ranks need of each other, and
/// their nodes. Each group is examined on first use, once for all schedules.
class KvGroups {
 public:
  /// The problem and the operands of `input` must outlive it.
  explicit KvGroups(const PlanInput& input) : problem_(input.problem), operands_(input.operands) {}

  /// The plan of one rank, of the same problem, operands and nodes.
  [[nodiscard]] RankPlan plan(const PlanInput& input, Schedule schedule, int rank);
  /// For each of these ranks, the index of the first of them whose plan it can reuse. Their plans
  /// with a single group differ only in the heads, and in the numbers of ranks, which all differ by
  /// the same amount.
  [[nodiscard]] std::vector<std::size_t> alike(const Prices& prices, const std::vector<int>& ranks);

 private:
  struct Group {
    KvNeeds needs;
    GroupNodes nodes;
  };
  using Groups = std::map<std::vector<int>, std::unique_ptr<Group>>;  // by its ranks

  Groups::value_type& group_of(const Prices& prices, int rank);

  const AttentionProblem& problem_;
  const ShardedOperands& operands_;
  Groups groups_;
};

}  // namespace annulus::ring
