#pragma once

#include <string>
#include <utility>
#include <vector>

#include <annulus/verification/verification.hpp>

/// Cases of the backward pass, for the ranks of a mesh.
namespace annulus::ring {

struct GradientCase {
  std::string mesh;
  verification::ShardedCase sharded;
};

inline std::string to_string(const GradientCase& one) {
  const verification::ShardedCase& c = one.sharded;
  return one.mesh + " " + annulus::to_string(c.layout.query) + " " +
         annulus::to_string(c.layout.kv) + ", " + c.schedule + ", " +
         std::string(annulus::name_of(c.problem.dtype)) +
         (c.problem.bias ? ", bias " + annulus::to_string(*c.problem.bias) : "");
}

inline AttentionProblem backward_problem(DType dtype, std::int64_t heads, std::int64_t kv_heads) {
  AttentionProblem problem;
  problem.shape = {2, 23, 23, heads, kv_heads, 6, 5};
  problem.dtype = dtype;
  problem.mask.set_causal(true);
  return problem;
}

inline GradientCase gradient_case(std::string mesh, const char* query, const char* kv,
                                  const char* schedule, AttentionProblem problem,
                                  const BackwardRequest& request = {}) {
  GradientCase one{std::move(mesh), {}};
  one.sharded.problem = std::move(problem);
  one.sharded.layout = {PartitionSpec::parse(query), PartitionSpec::parse(kv), LayoutKind::zigzag};
  one.sharded.schedule = schedule;
  one.sharded.plan.emplace();
  one.sharded.backward = {.request = request};
  return one;
}

/// For so many ranks: every way that gradients take.
inline std::vector<GradientCase> gradient_cases(int ranks) {
  const std::string all = "sp=" + std::to_string(ranks) + ",x=1,tp=1";
  const int two = ranks % 2 == 0 ? 2 : ranks;
  std::vector<GradientCase> cases;
  const auto add = [&](const char* schedule, const AttentionProblem& problem,
                       const BackwardRequest& request = {}) -> verification::ShardedCase& {
    cases.push_back(gradient_case(all, "-,sp", "-,sp", schedule, problem, request));
    return cases.back().sharded;
  };
  for (const char* schedule : {"ring", "allgather", "ulysses"}) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      add(schedule, backward_problem(dtype, 4, 2));
    }
  }
  // Straight to the owner, with a gradient of the LSE, added to what is there.
  add("ring", backward_problem(DType::bfloat16, 4, 4), {true, true}).plan->direct = true;
  for (const bool adds : {false, true}) {
    PlanOptions& plan =
        *add("double_ring", backward_problem(DType::bfloat16, 4, 2), {.adds = adds}).plan;
    plan.inner_size = two;
    plan.direct = adds;
  }
  for (const std::int64_t kv_heads : {4, 1}) {  // one: ranks share it
    PlanOptions& plan =
        *add("hybrid", backward_problem(DType::bfloat16, 4, kv_heads), {true, kv_heads == 1}).plan;
    plan.ulysses_degree = two;
    plan.direct = kv_heads == 1;
  }
  // Rows that go round.
  add("pass_q", backward_problem(DType::float32, 4, 4));
  add("pass_q", backward_problem(DType::bfloat16, 4, 4), {true, true});
  // Parts that are rounded for their way to the owner.
  for (const char* schedule : {"ring", "allgather", "ulysses"}) {
    for (const bool adds : {false, true}) {
      add(schedule, backward_problem(DType::bfloat16, 4, 1), {.adds = adds}).backward->grad_wire =
          DType::bfloat16;
    }
  }
  // The gradient of the sinks too.
  for (const char* schedule : {"ring", "ulysses"}) {
    const BackwardRequest request{true, schedule == std::string("ring"), true};
    AttentionProblem problem = backward_problem(DType::float32, 4, 2);
    problem.sinks = Sinks::random(4, 2, 3);
    add(schedule, problem, request);
    problem.sinks = Sinks({2}, {0.5F, -1});
    problem.dtype = DType::bfloat16;
    add(schedule, problem, request);
    if (ranks <= 2) {  // two batches
      cases.push_back(gradient_case(all, "sp,-,tp", "sp,-,tp", "local", problem, request));
    }
    // An axis of size 1 makes no other group, whose messages would meet those of the schedule.
    cases.push_back(
        gradient_case(all + ",fsdp=1", "-,fsdp+sp", "-,fsdp+sp", schedule, problem, request));
  }
  // A head at a time, of which a window hides most hops.
  for (const char* schedule : {"allgather", "ring"}) {
    AttentionProblem window = backward_problem(DType::float32, 4, 4);
    window.mask.set_window(6, 0);
    add(schedule, window, {.grad_lse = true}).plan->gather_bytes = 1;
  }
  // Operands that ranks hold alike.
  const AttentionProblem halves = backward_problem(DType::bfloat16, 4, 2);
  cases.push_back(gradient_case(all, "-,-", "-,sp", "ring", halves));
  cases.push_back(gradient_case(all, "-,sp", "-,-", "local", halves));
  if (ranks % 2 != 0) return cases;
  const std::string half = "sp=" + std::to_string(ranks / 2);
  const auto add_half = [&](const char* axis, const char* query, const char* kv,
                            const char* schedule, const AttentionProblem& problem,
                            const BackwardRequest& request = {}) {
    cases.push_back(gradient_case(half + axis, query, kv, schedule, problem, request));
  };
  const AttentionProblem floats = backward_problem(DType::float32, 4, 2);
  for (const bool shared : {false, true}) {
    AttentionProblem sinks = floats;
    sinks.sinks = shared ? Sinks({2}, {0.5F, -1}) : Sinks::random(4, 2, 3);
    add_half(",tp=2", "-,sp,tp", "-,sp,tp", "ring", sinks, {.grad_sinks = true});
  }
  for (const char* schedule : {"ring", "allgather"}) {
    add_half(",x=2", "-,sp+x", "-,sp", schedule, floats);
  }
  for (const char* schedule : {"ring", "ulysses"}) {
    add_half(",tp=2", "-,sp,tp", "-,sp,tp", schedule, backward_problem(DType::bfloat16, 4, 1));
  }
  return cases;
}

/// Cases that also compute the gradient of a bias.
inline std::vector<GradientCase> bias_gradient_cases(int ranks) {
  const std::string all = "sp=" + std::to_string(ranks);
  const int two = ranks % 2 == 0 ? 2 : ranks;
  constexpr std::int64_t kLength = 23;
  std::vector<GradientCase> cases;
  // Rows or heads of its own or of all, and keys of its own or of all.
  const std::vector<Extents> shapes{{2, 4, kLength, kLength},
                                    {1, 4, kLength, kLength},
                                    {2, 1, kLength, kLength},
                                    {1, 4, 1, kLength},
                                    {2, 1, 1, kLength},
                                    {2, 4, kLength, 1},
                                    {1, 1, 1, 1}};
  const auto biased = [](const Extents& shape, std::int64_t kv_heads) {
    AttentionProblem problem = backward_problem(DType::float32, 4, kv_heads);
    problem.bias = shape;
    return problem;
  };
  for (const char* schedule : {"ring", "double_ring", "allgather", "ulysses", "hybrid", "pass_q"}) {
    bool adds = false;
    for (const Extents& shape : shapes) {
      cases.push_back(gradient_case(all, "-,sp", "-,sp", schedule, biased(shape, 2),
                                    {adds, adds, false, true}));
      cases.back().sharded.plan->inner_size = two;
      cases.back().sharded.plan->ulysses_degree = two;
      adds = !adds;
    }
    cases.back().sharded.problem.dtype = DType::bfloat16;
  }
  // Operands that ranks hold alike, and ranks with batches of their own.
  for (const Extents& shape : shapes) {
    const BackwardRequest request{.grad_bias = true};
    cases.push_back(gradient_case(all, "-,-", "-,sp", "ring", biased(shape, 2), request));
    cases.push_back(gradient_case(all, "-,sp", "-,-", "local", biased(shape, 2), request));
    if (ranks > 2) continue;
    cases.push_back(gradient_case(all, "sp,-", "sp,-", "local", biased(shape, 2), request));
  }
  if (ranks % 2 != 0) return cases;
  const std::string half = "sp=" + std::to_string(ranks / 2) + ",tp=2";
  for (const char* schedule : {"ring", "ulysses"}) {
    for (const Extents& shape : shapes) {
      AttentionProblem problem = biased(shape, 1);
      problem.sinks = Sinks({2}, {0.5F, -1});
      cases.push_back(
          gradient_case(half, "-,sp,tp", "-,sp,tp", schedule, problem, {true, false, true, true}));
    }
  }
  return cases;
}

}  // namespace annulus::ring
