#include "face/sharded_options.hpp"

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <annulus/ring/tuning_cache.hpp>

#include "tuning/parameters.hpp"

namespace annulus {
namespace {

ring::TuningOptions tuning_options(const AttentionOptions& options, Context& context) {
  ring::TuningOptions tuning = options.tuning;
  if (tuning.cache == nullptr) tuning.cache = &context.tuning_cache();
  return tuning;
}

// Causal and window do not count: they are settings of a call, not a mask that the caller gives.
bool has_mask(const AttentionOptions& options) {
  const Mask& mask = options.mask;
  return options.dense_mask || mask.block_mask() || mask.has_segments() ||
         !mask.query_lengths().empty() || !mask.kv_lengths().empty();
}

}  // namespace

bool makes_bias(const AttentionOptions& options) {
  return options.init_bias && !options.bias && !has_mask(options);
}

AttentionProblem problem_of(const AttentionOptions& options) {
  AttentionProblem problem = options;
  if (makes_bias(options)) problem.bias = options.init_bias->shape;
  return under_policy(options.bias_policy, std::move(problem));
}

ring::ShardedAttentionOptions sharded_options(const AttentionOptions& options, Context& context) {
  const auto named = [](const std::string& name) { return name.empty() ? "auto" : name; };
  const bool open_transport = options.transport == Transport::automatic;
  return {.implementation = named(options.implementation),
          .schedule = named(options.schedule),
          .plan = ring::with_parameters(
              options.plan.value_or(ring::PlanOptions::for_place(context.place())), options),
          .cost_model = options.cost_model ? std::optional(*options.cost_model) : std::nullopt,
          .runner = {.threads = context.threads(),
                     .tracer = options.tracer,
                     .watch = &context.mesh().call_watch()},
          .transport = open_transport ? context.transport() : options.transport,
          .tuning = tuning_options(options, context),
          .overlay = context.overlay()};
}

std::shared_ptr<const ring::CostModel> ring::read_cost_model(std::string_view text,
                                                             const std::string& path) {
  return std::make_shared<CostModel>(parse_cost_model(text, path));
}

ring::ShardedAttentionOptions backward_options(const AttentionOptions& options, Context& context) {
  ring::ShardedAttentionOptions sharded = sharded_options(options, context);
  if (!options.backward.implementation.empty()) {
    sharded.implementation = options.backward.implementation;
  }
  if (!options.backward.schedule.empty()) sharded.schedule = options.backward.schedule;
  sharded.plan->grad_wire = options.backward.grad_wire;
  return sharded;
}

}  // namespace annulus
