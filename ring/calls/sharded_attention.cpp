#include <algorithm>
#include <array>
#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/attention/modifiers.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/first_error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/ring/sharded_attention.hpp>

#include "calls/call_tensors.hpp"
#include "calls/call_values.hpp"
#include "schedules/building/refusals.hpp"
#include "tuning/chain.hpp"
#include "tuning/choice.hpp"

namespace annulus::ring {
namespace {

// The modifiers, with the contents of tensors that the problem holds.
std::string exact_modifiers(AttentionProblem problem) {
  problem.scale = problem.logit_scale();  // named or not
  std::string text;
  for (const Modifier& one : modifiers_of(problem)) {
    text += (text.empty() ? "" : ", ") + one.text;
    if (one.digest != 0) text += fmt::format(" ({:016x})", one.digest);
  }
  return text;
}

// All that ranks must agree on, a line each. Ranks that differ would exchange mismatched messages,
// or compute one tensor in two ways.
std::string fingerprint(const PlanInput& input, const ShardedAttentionOptions& options,
                        const std::optional<ScheduleVariant>& kept) {
  const AttentionProblem& problem = input.problem;
  const PlanOptions& plan = input.options;
  std::string candidates;
  for (const Implementation* candidate : input.candidates) {
    candidates += (candidates.empty() ? "" : "+") + candidate->names().front();
  }
  return fmt::format(
      "shape {}\n{}\nmodifiers {}\nmask {} ({:016x})\nquery {}\nkey/value {}\nschedule {}\n"
      "implementations {}\npreferred {}\nulysses degree {}\ninner size {}\ngather bytes {}\n"
      "head group bytes {}\nresult bytes {}\nprefetch bytes {}\n{}\n{}\nLSE {}\n"
      "gradients sent in {}\ncost model {:016x}\ntransport "
      "{}\n{}\n{}\n{}",
      to_string(problem.shape), annulus::name_of(problem.dtype), exact_modifiers(problem),
      to_string(problem.mask), problem.mask.digest(), to_string(input.operands.query),
      to_string(input.operands.key), kept ? "kept: " + variant_text(*kept) : options.schedule,
      candidates, plan.preferred.empty() ? "none" : plan.preferred, plan.ulysses_degree,
      plan.inner_size, plan.gather_bytes, plan.head_group_bytes, plan.result_bytes,
      plan.prefetch_bytes, plan.direct ? "direct" : "from neighbours",
      plan.await_columns ? "awaiting columns" : "awaiting none", annulus::name_of(plan.lse_dtype),
      annulus::name_of(plan.grad_wire),
      options.cost_model ? std::hash<std::string>()(to_json(*options.cost_model)) : 0,
      name_of(options.transport), options.runner.replay ? "replayed" : "not replayed",
      options.runner.tracer == nullptr ? "not traced" : "traced",
      input.backward ? "backward, " + request_text(*input.backward) : "forward");
}

// The lines in which two fingerprints differ.
std::pair<std::string, std::string> differences(const std::string& mine, const std::string& other) {
  std::pair<std::string, std::string> differ;
  std::istringstream lines(mine);
  std::istringstream others(other);
  for (std::string a, b; std::getline(lines, a) && std::getline(others, b);) {
    if (a == b) continue;
    differ.first += (differ.first.empty() ? "" : ", ") + a;
    differ.second += (differ.second.empty() ? "" : ", ") + b;
  }
  return differ;
}

void check_same_plan(Control& control, const std::string& mine) {
  const auto other = control.first_difference(mine, "what to compute");
  if (!other) return;
  const auto [found, expected] = differences(other->text, other->expected);
  throw ArgumentError(fmt::format("attention on rank {}", other->rank), found,
                      "what rank 0 computes, " + expected);
}

// Unnormalised outputs and attention weights have no gradients, and a gradient of sinks or a bias
// requires that the problem has them.
void check_has_gradients(const AttentionProblem& problem, const BackwardRequest& request) {
  if (request.grad_sinks && !problem.sinks) {
    throw ArgumentError("grad sinks", "a tensor", "none: the problem has no sinks");
  }
  if (request.grad_bias && !problem.bias) {
    throw ArgumentError("grad bias", "a tensor", "none: the problem has no bias");
  }
  if (!problem.normalize_output) {
    throw ArgumentError("normalize_output", "false",
                        "true: an unnormalised output has no backward pass");
  }
  if (problem.weights) {
    throw ArgumentError("weights", "true", "false: attention weights have no backward pass");
  }
}

ShardedAttentionOptions of_pass(ShardedAttentionOptions options) {
  if (options.backward) options.tuning.policy = TuningPolicy::off;
  return options;
}

bool anywhere(bool here, Control& ranks, std::string_view what) {
  return ranks.max(std::array{here ? 1.0 : 0.0}, what)[0] > 0;
}

}  // namespace

std::string request_text(const BackwardRequest& request) {
  return fmt::format("{}{}{}{}", request.adds ? "added" : "written",
                     request.grad_lse ? ", with a gradient of the LSE" : "",
                     request.grad_sinks ? ", with the gradient of the sinks" : "",
                     request.grad_bias ? ", with the gradient of the bias" : "");
}

ShardedAttention::ShardedAttention(const AttentionProblem& problem, const ShardedOperands& operands,
                                   Mesh& mesh, const Registry& registry, Device& device,
                                   const ShardedAttentionOptions& options)
    : operands_(operands),
      mesh_(mesh),
      registry_(registry),
      device_(device),
      options_(under_overlay(of_pass(options), device.place())) {
  check_same_tuning(mesh.world(), options);
  // The plans that the chain chooses from. Making them checks that all ranks plan alike.
  const std::unique_ptr<Planning> open = make_planning(problem);
  use_group();
  open->input.prices.model.adopt_transport(transport_);
  const std::string schedule = collectively(
      mesh.world(), "schedule", [&] { return open->selection.schedule_for(options_.schedule); });
  const ShardedAttentionOptions asked = options_;
  TuningChain chain({problem, operands_, mesh, registry, device, asked}, open->input, schedule);
  // Passes to the next link; after the last link, throws the error as its own type.
  const auto go_on = [&]<class Kind>(const Kind& error) {
    drop_runner();
    if (chain.reject(error.what())) return;
    const std::string tried = chain.tried();
    if (tried.empty()) throw;
    throw Kind(error.what() + tried);
  };
  while (true) {
    decision_ = chain.decide();
    try {
      options_ = with_choice(asked, decision_.choice, device.place());
      planning_ = make_planning(problem);
      use_group();
      plan_until_prepared(nullptr);
      return;
    } catch (const UnsupportedError& error) {
      go_on(error);
    } catch (const UserError& error) {
      go_on(error);
    } catch (const AgreedFailure& error) {
      go_on(error);
    }
  }
}

void ShardedAttention::use_group() {
  group_ = &mesh_.group(operands_.key.spec()[1], device_.place(), options_.transport);
  transport_ = group_->transport();
}

// All ranks have groups along the same axes, in the same order.
std::vector<Group*> ShardedAttention::groups_of(const RankPlan& plan) {
  std::vector<Group*> groups;
  for (const PlanGroup& group : plan.groups) {
    groups.push_back(&mesh_.group(group.axes, device_.place(), options_.transport));
  }
  return groups;
}

std::unique_ptr<ShardedAttention::Planning> ShardedAttention::make_planning(
    AttentionProblem problem, const std::optional<ScheduleVariant>& kept) const {
  Control& control = mesh_.world();
  PlanOptions plan = options_.plan.value_or(PlanOptions::for_place(device_.place()));
  const bool own_gpu = !device_.place().is_host() && !mesh_.ranks_on_one_gpu(device_.place());
  plan.await_columns = plan.await_columns && own_gpu;
  auto planning = collectively(control, "planning", [&] {
    const Computing computing = control.computing();
    problem.validate();
    if (options_.backward) check_has_gradients(problem, *options_.backward);
    const Place place = device_.place();
    CostModel model = options_.cost_model.value_or(CostModel::for_place(place));
    model.use_threads(options_.runner.threads);
    Selection selection =
        registry_.select(options_.implementation, problem, place, Presence::required,
                         options_.backward ? Pass::backward : Pass::forward);
    auto made = std::make_unique<Planning>(std::move(problem), std::move(selection), operands_,
                                           place, std::move(model), plan, options_.backward);
    const Topology& topology = mesh_.topology();
    if (topology.nodes() > 1) made->input.prices.node_of_rank = topology.node_of_rank;
    made->kept = kept;
    return made;
  });
  check_same_plan(control, fingerprint(planning->input, options_, kept));
  share_prices(planning->input.prices, control);
  return planning;
}

// Rank 0 chooses for all: choosing examines other ranks' plans, and all ranks must choose alike.
void ShardedAttention::choose() {
  if (planning_->kept) return planning_->settle(ScheduleChoice{*planning_->kept, 0, {}});
  Control& control = mesh_.world();
  planning_->settle({});  // undoes an earlier choice
  ScheduleChoice choice = collectively(control, "choice of a schedule", [&] {
    const Computing computing = control.computing();
    return control.rank() == 0
               ? choose_schedule(planning_->input,
                                 planning_->selection.schedule_for(options_.schedule))
               : ScheduleChoice{};
  });
  // The other ranks have zeros, so the maximum is what rank 0 has chosen.
  const std::vector<double> chosen = control.max(
      std::array{static_cast<double>(choice.schedule), static_cast<double>(choice.ulysses_degree),
                 static_cast<double>(choice.inner_size)},
      "schedule");
  choice.schedule = static_cast<Schedule>(chosen[0]);
  choice.ulysses_degree = static_cast<int>(chosen[1]);
  choice.inner_size = static_cast<int>(chosen[2]);
  planning_->settle(choice);
}

// Plans until no kernel of any rank refuses a block. Every round excludes at least one
// implementation for a block.
void ShardedAttention::plan_until_prepared(const std::vector<CallTensor>* tensors) {
  Control& control = mesh_.world();
  PlanInput& input = planning_->input;
  input.prices.model.adopt_transport(transport_);
  while (true) {
    const bool fresh = !runner_;
    RankPlan plan;
    std::vector<Group*> groups;
    if (fresh) {
      choose();
      plan = collectively(control, "planning", [&] {
        const Computing computing = control.computing();
        return make_rank_plan(input, planning_->schedule.schedule, mesh_.rank());
      });
      groups = groups_of(plan);
    }
    const std::vector<Refusal> refusals = collectively(control, "preparation of kernels", [&] {
      const Computing computing = control.computing(kComputingTimeouts);
      if (fresh) {
        runner_ = make_runner(planning_->problem, std::move(plan), input.candidates,
                              std::move(groups), device_, mesh_.watchdog(), options_.runner);
      }
      // Addresses are not known before the first call; contiguous is a guess.
      return runner_->prepare(tensors == nullptr ? runner_->expected() : *tensors);
    });
    std::vector<Refusal> refused = refusals_of_all(control, input.problem, refusals);
    if (refused.empty()) break;
    refuse(input, std::move(refused));
    drop_runner();
  }
  if (connected_) return;
  collectively(control, "preparation of transfers", [&] { runner_->connect(); });
  // Ranks without such a kernel refuse too, so that a capture succeeds on all ranks or on none.
  if (anywhere(runner_->awaits_arrivals(), control, "kernels that wait")) {
    runner_->refuse_capture();
  }
  connected_ = true;
}

void ShardedAttention::drop_runner() {
  retire(std::move(runner_));
  connected_ = false;
}

// A runner that the caller's graphs hold stays until the graphs are destroyed.
void ShardedAttention::retire(std::unique_ptr<Runner> runner) {
  std::erase_if(retired_, [](const auto& one) { return !one->is_captured(); });
  if (runner && runner->is_captured()) retired_.push_back(std::move(runner));
}

bool ShardedAttention::reduces_rounded() const {
  const RankPlan& plan = rank_plan();
  if (!options_.backward) return plan.reduces_rounded();
  const std::vector<const BackwardBlock*> blocks = plan.all<BackwardBlock>();
  const bool adds_up = mesh_.size() > 1 || blocks.size() > 1;
  return adds_up && std::ranges::any_of(blocks, [&](const BackwardBlock* block) {
           return implementation_of(*block).declares().backward->rounds;
         });
}

bool ShardedAttention::is_captured() {
  retire(nullptr);
  return !retired_.empty() || (runner_ && runner_->is_captured());
}

void ShardedAttention::check_usable() const {
  if (runner_ && connected_) return;
  throw LibraryError(fmt::format(
      "rank {}: this attention failed while it was prepared and cannot be used any more",
      mesh_.rank()));
}

// `change` replaces the planning and plans; if all ranks agree that it failed, `undo` restores the
// earlier state.
template <class Change, class Undo>
void ShardedAttention::try_or_undo(const Change& change, const Undo& undo) {
  try {
    change();
  } catch (const UserError&) {
    undo();
    throw;
  } catch (const AgreedFailure&) {
    undo();
    throw;
  }
}

std::vector<CallTensor> ShardedAttention::views_of(const LocalTensors& tensors) const {
  if (options_.backward) throw InternalError("a forward call of a backward plan");
  return by_content(tensors, planning_->problem);
}
std::vector<CallTensor> ShardedAttention::views_of(const BackwardLocalTensors& tensors) const {
  if (!options_.backward) throw InternalError("a backward call of a forward plan");
  return by_content(tensors, planning_->problem, *options_.backward);
}

template <class Tensors>
void ShardedAttention::prepare(const Tensors& tensors) {
  check_usable();
  std::vector<CallTensor> views;
  collectively(mesh_.world(), "tensors of the call", [&] {
    views = views_of(tensors);
    runner_->check(views);
    runner_->set_values(tensors.call_values, planning_->problem, planning_->mask);
  });
  prepared_ = true;
  if (!anywhere(!runner_->is_ready_for(views), mesh_.world(), "whether tensors have moved")) return;
  // Kernels may now accept what they refused for other strides. If none does, the plan for the
  // other tensors is kept.
  const std::vector<Refusal> refusals = std::exchange(planning_->input.refusals, {});
  const ScheduleChoice schedule = planning_->schedule;
  std::unique_ptr<Runner> runner;
  if (!refusals.empty()) {
    runner = std::exchange(runner_, nullptr);
    connected_ = false;
  }
  try_or_undo(
      [&] {
        plan_until_prepared(&views);
        retire(std::move(runner));
      },
      [&] {
        // Some ranks have come further than others, so all go back to the same state.
        prepared_ = false;
        planning_->input.refusals = refusals;
        planning_->settle(schedule);
        drop_runner();
        connected_ = runner != nullptr;
        runner_ = std::move(runner);
        if (!runner_) plan_until_prepared(nullptr);
      });
}

void ShardedAttention::rehearse(const LocalTensors& tensors) {
  prepare(tensors);
  Control& control = mesh_.world();
  try {
    collectively(control, "rehearsal of a call", [&] { runner_->rehearse(views_of(tensors)); });
  } catch (const Error&) {
    drop_runner();
    throw;
  }
}

bool ShardedAttention::set_values(const Mask& mask) {
  if (!differs_in_values_only(mask, planning_->problem)) return false;
  planning_->mask = mask;
  return true;
}

AttentionProblem ShardedAttention::problem_of(const CallValues& values) const {
  AttentionProblem problem = planning_->problem;
  const RankPlan& plan = rank_plan();
  apply_values(values, planning_->problem, planning_->mask, plan.global({0, plan.local.batch}),
               plan.local.heads, Place::host(), problem);
  if (values.sinks.rank() > 0) {
    problem.sinks = called_sinks(*problem.sinks, values.sinks, {plan.first_head, plan.local.heads});
  }
  return problem;
}

bool ShardedAttention::set_mask(const Mask& mask, NextSchedule next_schedule) {
  check_usable();
  if (set_values(mask)) return false;
  AttentionProblem problem = planning_->problem;
  problem.mask = mask;
  const bool keeps = next_schedule == NextSchedule::kept;
  std::unique_ptr<Planning> next = make_planning(
      std::move(problem), keeps ? std::optional<ScheduleVariant>(schedule()) : std::nullopt);
  collectively(mesh_.world(), "end of earlier calls", [&] { runner_->wait(); });
  drop_runner();  // before the next one takes memory
  prepared_ = false;
  std::swap(planning_, next);
  try_or_undo([&] { plan_until_prepared(nullptr); },
              [&] {
                drop_runner();
                std::swap(planning_, next);
                plan_until_prepared(nullptr);
              });
  return true;
}

template <class Tensors>
void ShardedAttention::submit(const Tensors& tensors, ForeignStream* caller) {
  check_usable();
  if (!prepared_) prepare(tensors);
  std::vector<CallTensor> views;
  try {
    views = views_of(tensors);
    runner_->set_values(tensors.call_values, planning_->problem, planning_->mask);
  } catch (const UserError& error) {
    // The other ranks may have begun the call, so the ranks cannot agree on the error.
    throw LibraryError(fmt::format("rank {}: {}", mesh_.rank(), error.what()));
  }
  runner_->submit(views, caller);
}

void ShardedAttention::wait() {
  check_usable();
  FirstError error;
  for (const auto& runner : retired_) error.of([&] { runner->wait(); });
  error.of([&] { runner_->wait(); });
  error.rethrow();
}

template <class Tensors>
void ShardedAttention::run(const Tensors& tensors) {
  const TraceScope call(options_.runner.tracer, "call",
                        {TraceCategory::call, options_.backward ? "backward" : "attention"});
  submit(tensors, nullptr);
  wait();
}

template void ShardedAttention::prepare(const LocalTensors& tensors);
template void ShardedAttention::prepare(const BackwardLocalTensors& tensors);
template void ShardedAttention::submit(const LocalTensors& tensors, ForeignStream* caller);
template void ShardedAttention::submit(const BackwardLocalTensors& tensors, ForeignStream* caller);
template void ShardedAttention::run(const LocalTensors& tensors);
template void ShardedAttention::run(const BackwardLocalTensors& tensors);

std::string ShardedAttention::implementations() const {
  std::string names;
  std::set<int> named;
  for (const Tile* block : rank_plan().tiles()) {
    if (!named.insert(block->implementation).second) continue;
    names += (names.empty() ? "" : "+") + implementation_of(*block).names().front();
  }
  return names.empty() ? "none" : names;
}

std::string ShardedAttention::implementations_of_ranks() const {
  std::set<std::string> names;
  for (const std::string& rank :
       mesh_.world().distinct_texts(implementations(), "implementations")) {
    std::istringstream text(rank);
    for (std::string name; std::getline(text, name, '+');) names.insert(name);
  }
  if (names.size() > 1) names.erase("none");
  return fmt::format("{}", fmt::join(names, "+"));
}

Selection ShardedAttention::selection() const {
  Selection selection = planning_->selection;
  for (auto& reason : passed_over_blocks(plan_input(), rank_plan())) {
    selection.passed_over.push_back(std::move(reason));
  }
  return selection;
}

}  // namespace annulus::ring
