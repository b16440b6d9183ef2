#include <algorithm>
#include <functional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>
#include <annulus/ring/planner.hpp>

#include "planner/all_ranks.hpp"
#include "planner/kv_groups.hpp"
#include "schedules/building/block_finder.hpp"
#include "schedules/schedules.hpp"

namespace annulus::ring {
namespace {

// Visible pairs times query heads of a rank; independent of the schedule.
double work_of(const PlanInput& input, int rank) {
  const ShardedOperands& operands = input.operands;
  const PositionRanges batches = operands.query.positions(rank, 0);
  if (batches.empty()) return 0;
  const PositionRange keys{GlobalPosition(0), input.problem.shape.kv_length, 1};
  double pairs = 0;
  for (const PositionRange& rows : operands.query.positions(rank, 1).ranges()) {
    pairs += static_cast<double>(
        input.problem.mask
            .examine(batches.global(LocalPosition(0)).value(), batches.size(), rows, keys)
            .pairs);
  }
  return pairs * static_cast<double>(operands.query.local_shape(rank)[2]);
}

std::vector<double> work_of_ranks(const PlanInput& input, const std::vector<int>& ranks) {
  std::vector<double> work;
  work.reserve(ranks.size());
  for (const int rank : ranks) work.push_back(work_of(input, rank));
  return work;
}

nlohmann::json to_json(const PositionRanges& positions) {
  nlohmann::json ranges = nlohmann::json::array();
  for (const PositionRange& range : positions.ranges()) {
    ranges.push_back({range.start.value(), range.length, range.stride});
  }
  return ranges;
}

PositionRanges parse_positions(const nlohmann::json& json) {
  std::vector<PositionRange> ranges;
  for (const auto& range : json) {
    ranges.push_back({GlobalPosition(range.at(0).get<std::int64_t>()),
                      range.at(1).get<std::int64_t>(), range.at(2).get<std::int64_t>()});
  }
  return PositionRanges(std::move(ranges));
}

}  // namespace

PlanInput make_plan_input(const AttentionProblem& problem, const ShardedOperands& operands,
                          std::vector<const Implementation*> candidates, Place place,
                          CostModel model, const PlanOptions& options,
                          std::optional<BackwardRequest> backward) {
  Prices prices = make_prices(std::move(model), problem, candidates, place,
                              backward ? Pass::backward : Pass::forward);
  return {problem, operands, std::move(candidates), std::move(prices), options, {}, backward};
}

PlanOptions PlanOptions::for_place(Place place) {
  PlanOptions options;
  if (place.is_host()) return options;
  options.result_bytes = std::int64_t{512} << 20;
  options.prefetch_bytes = std::int64_t{1} << 30;
  options.direct = true;
  options.lse_dtype = DType::float32;
  return options;
}

std::string to_json(std::span<const Refusal> refusals) {
  nlohmann::json all = nlohmann::json::array();
  for (const Refusal& refusal : refusals) {
    all.push_back({{"implementation", refusal.implementation},
                   {"rows", to_json(refusal.rows)},
                   {"columns", to_json(refusal.columns)},
                   {"batches", {refusal.batches.begin, refusal.batches.count}},
                   {"heads", refusal.heads},
                   {"full", refusal.full},
                   {"rounding", refusal.rounding},
                   {"reason", refusal.reason}});
  }
  return all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::vector<Refusal> parse_refusals(std::string_view text) {
  std::vector<Refusal> refusals;
  try {
    for (const auto& refusal : nlohmann::json::parse(text)) {
      refusals.push_back({refusal.at("implementation").get<std::string>(),
                          parse_positions(refusal.at("rows")),
                          parse_positions(refusal.at("columns")),
                          {refusal.at("batches").at(0).get<std::int64_t>(),
                           refusal.at("batches").at(1).get<std::int64_t>()},
                          refusal.at("heads").get<std::int64_t>(),
                          refusal.at("full").get<bool>(),
                          refusal.at("reason").get<std::string>(),
                          refusal.at("rounding").get<bool>()});
    }
  } catch (const nlohmann::json::exception& error) {
    throw InternalError(fmt::format("refusals of kernels: {}", error.what()));
  }
  return refusals;
}

Schedule parse_schedule(std::string_view name) {
  std::string known = "auto";
  for (const ScheduleEntry& entry : schedule_table()) {
    if (name == name_of(entry.schedule)) return entry.schedule;
    known += fmt::format(", {}", name_of(entry.schedule));
  }
  throw ArgumentError("schedule", fmt::format("'{}'", name), known);
}

int busiest_rank(const PlanInput& input, const std::vector<int>& ranks) {
  const std::vector<double> work = work_of_ranks(input, ranks);
  const auto most = std::max_element(work.begin(), work.end()) - work.begin();
  return ranks[static_cast<std::size_t>(most)];
}

RankPlan make_rank_plan(const PlanInput& input, Schedule schedule, int rank) {
  return KvGroups(input).plan(input, schedule, rank);
}

namespace {

// "zigzag", or "zigzag,contiguous" if queries and keys have different layouts.
std::string layout_name(const ShardedOperands& operands) {
  const auto name = [](const NamedSharding& sharding) {
    return std::string(annulus::name_of(sharding.distribution(1).layout()));
  };
  const std::string query = name(operands.query);
  const std::string key = name(operands.key);
  return query == key ? query : query + "," + key;
}

}  // namespace

Plan make_plan(const PlanInput& input, Schedule schedule, const std::vector<int>& ranks) {
  const ShardedOperands& operands = input.operands;
  Plan plan{input.problem, operands.key.mesh(), schedule, layout_name(operands), {}};
  plan.backward = input.backward;
  if (schedule == Schedule::hybrid) plan.ulysses_degree = ulysses_degree(input);
  if (schedule == Schedule::double_ring) plan.inner_size = inner_size(input);
  plan.ranks.reserve(ranks.size());
  std::vector<RankWork> planned;
  plan_each(input, schedule, ranks, [&](RankPlan rank) {
    planned.push_back({rank.rank, rank.work()});
    plan.ranks.push_back(std::move(rank));
  });
  const WorkOfRanks work = work_of_ranks(input, planned);
  plan.most_work = work.most;
  plan.mean_work = work.mean;
  return plan;
}

WorkOfRanks work_of_ranks(const PlanInput& input, std::span<const RankWork> planned) {
  const auto of = [](const auto& all, const auto& work_in) {
    WorkOfRanks result;
    for (const auto& one : all) {
      result.most = std::max(result.most, work_in(one));
      result.mean += work_in(one) / static_cast<double>(all.size());
    }
    return result;
  };
  const std::vector<double> held = work_of_ranks(input, all_ranks(input));
  const bool stays = std::all_of(planned.begin(), planned.end(), [&](const RankWork& one) {
    return one.work == held[static_cast<std::size_t>(one.rank)];
  });
  if (stays) return of(held, [](double work) { return work; });
  return of(planned, [](const RankWork& one) { return one.work; });
}

void plan_each(const PlanInput& input, Schedule schedule, const std::vector<int>& ranks,
               const std::function<void(RankPlan)>& take) {
  KvGroups groups(input);
  for (const int rank : ranks) take(groups.plan(input, schedule, rank));
}

Plan make_plan(const PlanInput& input, Schedule schedule) {
  return make_plan(input, schedule, all_ranks(input));
}

int ranks_per_row(const NamedSharding& key, const std::vector<int>& node_of_rank) {
  const AxisNames& axes = key.spec()[1];
  const int ranks = key.shards(1);
  int row = 0;
  for (int rank = 0; rank < key.mesh().ranks(); ++rank) {
    if (key.coordinate(rank, 1) != 0) continue;
    const std::vector<int> group = key.mesh().group(rank, axes);
    const auto node = [&](int member) {
      return node_of_rank.at(static_cast<std::size_t>(group[static_cast<std::size_t>(member)]));
    };
    int begin = 0;  // of a run of ranks on one node
    for (int member = 1; member <= ranks; ++member) {
      if (member < ranks && node(member) == node(begin)) continue;
      if (row == 0) row = member - begin;
      if (row != member - begin) return ranks;
      begin = member;
    }
  }
  return row;
}

std::vector<std::pair<std::string, std::string>> passed_over_blocks(const PlanInput& input,
                                                                    const RankPlan& plan) {
  const std::vector<const Tile*> blocks = plan.tiles();
  std::vector<std::pair<std::string, std::string>> result;
  for (std::size_t i = 0; i < input.candidates.size(); ++i) {
    std::size_t count = 0;
    std::string first;
    for (const Tile* block : blocks) {
      if (static_cast<std::size_t>(block->implementation) <= i) continue;
      std::string reason = obstacle_of(*input.candidates[i], input, plan, *block);
      if (reason.empty()) {
        reason = input.options.preferred.empty() ? "predicted to be slower"
                                                 : input.options.preferred + " is preferred";
      }
      if (count++ == 0) first = std::move(reason);
    }
    if (count == 0) continue;
    result.emplace_back(
        plan.implementations[i],
        fmt::format("{} of {} blocks of rank {}: {}", count, blocks.size(), plan.rank, first));
  }
  return result;
}

}  // namespace annulus::ring
