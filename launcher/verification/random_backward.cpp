#include "random_backward.hpp"

#include <utility>

#include <annulus/core/error.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::verification {

bool is_planned(const RandomProblem& drawn, const std::string& schedule,
                const std::optional<ring::BackwardRequest>& backward, DType grad_wire) {
  const Place place = Place::host();
  const ring::ShardedOperands operands =
      ring::shard_operands(drawn.problem, drawn.mesh, drawn.layout);
  ring::PlanOptions options = drawn.plan.value();
  options.grad_wire = grad_wire;
  try {
    ring::check_schedule(
        ring::make_plan_input(drawn.problem, operands, {}, place, ring::CostModel::for_place(place),
                              options, backward),
        schedule);
    return true;
  } catch (const UnsupportedError&) {
    return false;
  }
}

std::string plain_schedule(int kv_shards) {
  return kv_shards == 1 ? "local" : "ring";
}

void draw_backward(Draws& draws, RandomProblem& drawn, int kv_shards, Place::Kind device) {
  const bool wanted = draws.chance(50);
  BackwardCase backward;
  backward.request.grad_lse = draws.chance(40);
  backward.request.adds = draws.chance(30);
  backward.request.grad_sinks = drawn.problem.sinks.has_value();
  backward.request.grad_bias = drawn.problem.bias.has_value();
  if (device == Place::Kind::host && draws.chance(10)) backward.implementation = "vanilla";
  if (device == Place::Kind::cuda) {
    drawn.problem.reproducible = draws.chance(25) ? Reproducible::run : Reproducible::no;
    if (draws.chance(40)) drawn.plan->preferred = "sdpa";  // in both passes, where it can
  }
  backward.schedule =
      kv_shards == 1
          ? draws.pick({"local", "local", "auto", "ring", "allgather", "ulysses"})
          : draws.pick({"ring", "double_ring", "allgather", "ulysses", "hybrid", "pass_q", "auto"});
  const bool rounds = draws.chance(25);
  const auto planned = [&](const std::string& schedule) {
    return is_planned(drawn, schedule, backward.request, backward.grad_wire);
  };
  const std::string plain = plain_schedule(kv_shards);
  if (!drawn.problem.normalize_output || drawn.fills.key || !planned(plain)) return;
  if (backward.schedule != "auto" && !planned(backward.schedule)) backward.schedule = plain;
  if (rounds && size_of(drawn.problem.dtype) == size_of(DType::bfloat16)) {
    backward.grad_wire = DType::bfloat16;
    if (!planned(backward.schedule)) backward.grad_wire = DType::float32;
  }
  drawn.backward = std::move(backward);
  drawn.draws_backward = wanted;
}

}  // namespace annulus::verification
