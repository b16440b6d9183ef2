#include <algorithm>
#include <array>

#include <fmt/format.h>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/error.hpp>

#include "schedules/schedules.hpp"

namespace annulus::ring {
namespace {

const AxisNames& kv_axes(const PlanInput& input) {
  return input.operands.key.spec()[1];
}
const AxisNames& query_axes(const PlanInput& input) {
  return input.operands.query.spec()[1];
}

int ranks_of(const PlanInput& input) {
  return input.operands.key.shards(1);
}

bool is_sharded(const PlanInput& input) {
  return ranks_of(input) > 1;
}

// The number of axes that shard both columns and rows.
std::ptrdiff_t shared_axes(const PlanInput& input, std::ptrdiff_t& all) {
  const MeshShape& mesh = input.operands.key.mesh();
  all = 0;
  std::ptrdiff_t shared = 0;
  for (const std::string& axis : kv_axes(input)) {
    if (mesh.axis_size(axis) == 1) continue;
    ++all;
    shared += std::ranges::count(query_axes(input), axis);
  }
  return shared;
}

std::string nothing(const PlanInput& /*input*/) {
  return {};
}

std::string needs_whole_sequence(const PlanInput& input) {
  if (!is_sharded(input)) return {};
  return fmt::format("the key/value sequence is sharded along {}", to_string(kv_axes(input)));
}

std::string wants_sharded_sequence(const PlanInput& input) {
  if (is_sharded(input)) return {};
  return "the key/value sequence is not sharded: nothing has to be sent";
}

std::string needs_divisor(const PlanInput& input, const char* what, int size) {
  if (size > 0 && ranks_of(input) % size == 0) return {};
  return fmt::format("{} {} does not divide the {} ranks along {}", what, size, ranks_of(input),
                     to_string(kv_axes(input)));
}

std::string needs_rows_of_a_ring(const PlanInput& input) {
  return needs_divisor(input, "inner size", inner_size(input));
}

std::string wants_rows_of_a_ring(const PlanInput& input) {
  if (std::string reason = wants_sharded_sequence(input); !reason.empty()) return reason;
  const int inner = inner_size(input);
  if (inner > 1 && inner < ranks_of(input)) return {};
  return fmt::format("with an inner size of {} it is the ring", inner);
}

std::string needs_same_axes(const PlanInput& input) {
  if (!is_sharded(input)) return {};
  if (query_axes(input) != kv_axes(input)) {
    return fmt::format("queries are sharded along {}, keys and values along {}",
                       to_string(query_axes(input)), to_string(kv_axes(input)));
  }
  return {};
}

std::int64_t heads_of_rank(const PlanInput& input) {
  return input.problem.shape.heads / std::max(1, input.operands.query.shards(2));
}

std::string wants_heads(const PlanInput& input, int degree) {
  if (input.problem.in_global_order()) return {};  // there may be nothing but heads to divide
  const std::int64_t heads = heads_of_rank(input);
  if (heads >= degree) return {};
  return fmt::format("{} heads for {} ranks would leave ranks without work", heads, degree);
}

// A rank that computes some heads of all rows needs all rows of a bias or mask that heads share.
// `auto` does not choose a schedule with that need for memory.
std::string wants_scores_by_head(const PlanInput& input) {
  if (input.problem.in_global_order()) return {};
  for (const auto& [name, sharding] : {std::pair("bias", &input.operands.bias),
                                       std::pair("dense mask", &input.operands.dense_mask)}) {
    if (!*sharding || input.problem.shape.heads == 1) continue;
    const Extents& shape = (*sharding)->global_shape();
    if (shape[1] == 1 && shape[2] != 1) {
      return fmt::format("the heads share a {}, so every rank would need all of its rows", name);
    }
  }
  return {};
}

std::string wants_exchange_of_heads(const PlanInput& input) {
  if (std::string reason = wants_sharded_sequence(input); !reason.empty()) return reason;
  if (std::string reason = wants_scores_by_head(input); !reason.empty()) return reason;
  return wants_heads(input, ranks_of(input));
}

std::string needs_degree(const PlanInput& input) {
  if (std::string reason = needs_same_axes(input); !reason.empty()) return reason;
  return needs_divisor(input, "ulysses degree", ulysses_degree(input));
}

std::string wants_degree(const PlanInput& input) {
  if (std::string reason = wants_sharded_sequence(input); !reason.empty()) return reason;
  const int degree = ulysses_degree(input);
  if (degree == 1) return "with a ulysses degree of 1 it is the ring";
  if (degree == ranks_of(input)) {
    return fmt::format("with a ulysses degree of {} it is ulysses", degree);
  }
  if (std::string reason = wants_scores_by_head(input); !reason.empty()) return reason;
  return wants_heads(input, degree);
}

std::string needs_rows_once(const PlanInput& input) {
  std::ptrdiff_t all = 0;
  const std::ptrdiff_t shared = shared_axes(input, all);
  if (shared == 0) return {};
  if (shared < all) {
    return fmt::format("queries are sharded along {}, some but not all axes of keys and values, {}",
                       to_string(query_axes(input)), to_string(kv_axes(input)));
  }
  return {};
}

// Bytes of a bias or a dense mask that are sent with the queries.
std::int64_t sent_bytes(const std::optional<NamedSharding>& scores, DType dtype) {
  if (!scores || scores->global_shape()[2] == 1) return 0;
  return scores->global_shape().product() * static_cast<std::int64_t>(size_of(dtype));
}

// Bytes of all rows, with their results or gradients, and of all columns with theirs; each is sent
// once for every other rank. Every rank gets a part of a bias or a mask of its own, but all of it
// if its gradient is wanted.
struct SentBytes {
  std::int64_t rows = 0, columns = 0;
};

SentBytes sent_once(const PlanInput& input) {
  const AttentionShape& shape = input.problem.shape;
  const auto element = static_cast<std::int64_t>(size_of(input.problem.dtype));
  const auto sum = static_cast<std::int64_t>(size_of(partial_dtype(input.problem.dtype)));
  const std::int64_t dims = shape.head_dim + shape.value_dim;
  std::int64_t row = element * shape.head_dim + sum * shape.value_dim;
  std::int64_t column = element * dims;
  if (input.backward) {
    row = element * dims + 2 * sum + sum * shape.head_dim;
    column += sum * dims;
  }
  std::int64_t scores = 0;
  if (!has_replicated_rows(input)) {
    scores = sent_bytes(input.operands.bias, DType::float32) +
             sent_bytes(input.operands.dense_mask, DType::boolean);
    if (input.backward && input.backward->grad_bias) {
      scores += sent_bytes(input.operands.bias, DType::float32);
    } else {
      scores /= ranks_of(input);
    }
  }
  return {shape.batch * shape.query_length * shape.heads * row + scores,
          shape.batch * shape.kv_length * shape.kv_heads * column};
}

std::string wants_short_queries(const PlanInput& input) {
  if (std::string reason = wants_sharded_sequence(input); !reason.empty()) return reason;
  const SentBytes sent = sent_once(input);
  if (sent.rows < sent.columns) return {};
  return fmt::format("queries and their {} would be more to send than keys and values{}",
                     input.backward ? "gradients" : "results", input.backward ? " and theirs" : "");
}

template <Schedule schedule>
std::vector<ScheduleVariant> only_one(const PlanInput& /*input*/) {
  return {{schedule}};
}

std::vector<ScheduleVariant> rows_of_a_ring(const PlanInput& input) {
  return {{Schedule::double_ring, 0, inner_size(input)}};
}

// All degrees that leave no rank without work.
std::vector<ScheduleVariant> degrees(const PlanInput& input) {
  std::vector<ScheduleVariant> variants;
  const int ranks = ranks_of(input);
  if (input.options.ulysses_degree == 0) {
    for (int degree = 2; degree < ranks && degree <= heads_of_rank(input); ++degree) {
      if (ranks % degree == 0) variants.push_back({Schedule::hybrid, degree, 0});
    }
  }
  if (variants.empty()) variants.push_back({Schedule::hybrid, ulysses_degree(input), 0});
  return variants;
}

// Ranks with the same rows compute their own columns under every schedule, and the gradients of the
// rows are summed.
template <RankPlan (*plan)(const RankContext& context)>
RankPlan backward(const RankContext& context) {
  const bool alone = context.group.size() == 1 || has_replicated_rows(context.input);
  return alone ? plan_local_backward(context) : plan(context);
}

constexpr std::array kTable{
    ScheduleEntry{Schedule::local, plan_local, plan_local_backward, needs_whole_sequence, nothing,
                  only_one<Schedule::local>},
    ScheduleEntry{Schedule::ring, plan_ring, backward<plan_ring_backward>, nothing,
                  wants_sharded_sequence, only_one<Schedule::ring>},
    ScheduleEntry{Schedule::double_ring, plan_double_ring, backward<plan_double_ring_backward>,
                  needs_rows_of_a_ring, wants_rows_of_a_ring, rows_of_a_ring},
    ScheduleEntry{Schedule::pass_q, plan_pass_q, backward<plan_pass_q_backward>, needs_rows_once,
                  wants_short_queries, only_one<Schedule::pass_q>},
    ScheduleEntry{Schedule::ulysses, plan_ulysses, backward<plan_ulysses_backward>, needs_same_axes,
                  wants_exchange_of_heads, only_one<Schedule::ulysses>},
    ScheduleEntry{Schedule::hybrid, plan_hybrid, backward<plan_hybrid_backward>, needs_degree,
                  wants_degree, degrees},
    ScheduleEntry{Schedule::allgather, plan_allgather, backward<plan_allgather_backward>, nothing,
                  wants_sharded_sequence, only_one<Schedule::allgather>}};

}  // namespace

std::span<const ScheduleEntry> schedule_table() {
  return kTable;
}

namespace {

// Parts that are rounded for sending are rounded only once if they go straight to the owner.
std::string allows_grad_wire(Schedule schedule, const PlanInput& input) {
  const DType wire = input.options.grad_wire;
  const DType dtype = input.problem.dtype;
  if (wire == DType::float32) return {};
  if (size_of(dtype) > size_of(wire)) {
    return fmt::format("gradients of {} are not rounded to {} for sending", annulus::name_of(dtype),
                       annulus::name_of(wire));
  }
  if (input.problem.in_global_order()) {
    return fmt::format(
        "reproducible world: gradients rounded to {} for sending depend on the number of ranks; "
        "--reproducible world wants grad wire float32; --reproducible run has no such limit",
        annulus::name_of(wire));
  }
  const int ranks = ranks_of(input);
  const int degree = ulysses_degree(input);
  const bool sums = schedule == Schedule::double_ring
                        ? inner_size(input) < ranks
                        : schedule == Schedule::hybrid && degree > 1 && degree < ranks;
  if (!sums || has_replicated_rows(input)) return {};
  return fmt::format(
      "it sums gradients along their way, so grad wire {} would round them several "
      "times",
      annulus::name_of(wire));
}

}  // namespace

std::string obstacle_of(const ScheduleEntry& entry, const PlanInput& input) {
  std::string obstacle = entry.obstacle(input);
  if (!input.backward || !obstacle.empty()) return obstacle;
  obstacle = needs_rows_once(input);
  return obstacle.empty() ? allows_grad_wire(entry.schedule, input) : obstacle;
}

std::string named_obstacle_of(const ScheduleEntry& entry, const PlanInput& input) {
  std::string obstacle = obstacle_of(entry, input);
  if (!obstacle.empty() || entry.schedule == Schedule::local || !kv_axes(input).empty()) {
    return obstacle;
  }
  const NamedSharding& key = input.operands.key;
  return fmt::format(
      "it would have nothing to send, as the key/value spec {} shards the sequence along no axis "
      "of the mesh {}; expected an axis for it (sp by default), or schedule local or auto",
      to_string(key.spec()), to_string(key.mesh()));
}

const ScheduleEntry& entry_of(Schedule schedule) {
  for (const ScheduleEntry& entry : kTable) {
    if (entry.schedule == schedule) return entry;
  }
  throw InternalError("schedule without a planner");
}

bool has_replicated_rows(const PlanInput& input) {
  std::ptrdiff_t all = 0;
  return shared_axes(input, all) == 0;
}

int inner_size(const PlanInput& input) {
  if (input.options.inner_size != 0) return input.options.inner_size;
  if (input.prices.node_of_rank.empty()) return ranks_of(input);
  return ranks_per_row(input.operands.key, input.prices.node_of_rank);
}

}  // namespace annulus::ring
