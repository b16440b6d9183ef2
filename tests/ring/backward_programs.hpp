#pragma once

#include <string>
#include <vector>

#include "tests/ring/backward_program.hpp"

namespace annulus::ring::test {

inline AttentionProblem backward_problem(DType dtype, std::int64_t heads, std::int64_t kv_heads) {
  AttentionProblem problem;
  problem.shape = {2, 23, 23, heads, kv_heads, 6, 5};
  problem.dtype = dtype;
  problem.mask.set_causal(true);
  return problem;
}

/// Programs for so many ranks: every way that gradients take.
inline std::vector<Program> backward_programs(int ranks) {
  const std::string all = "sp=" + std::to_string(ranks) + ",x=1,tp=1";
  std::vector<Program> programs;
  for (const Schedule schedule : {Schedule::ring, Schedule::allgather, Schedule::ulysses}) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      programs.push_back({all, "-,sp", "-,sp", schedule, backward_problem(dtype, 4, 2)});
    }
  }
  // Straight to the owner, with a gradient of the LSE, added to what is there.
  Program direct{all, "-,sp", "-,sp", Schedule::ring, backward_problem(DType::bfloat16, 4, 4)};
  direct.options.direct = true;
  direct.request = {true, true};
  programs.push_back(direct);
  Program rows{all, "-,sp", "-,sp", Schedule::double_ring, backward_problem(DType::bfloat16, 4, 2)};
  rows.options.inner_size = ranks % 2 == 0 ? 2 : ranks;
  for (const bool adds : {false, true}) {
    rows.request.adds = adds;
    rows.options.direct = adds;
    programs.push_back(rows);
  }
  for (const std::int64_t kv_heads : {4, 1}) {  // one: ranks share it
    Program both{all, "-,sp", "-,sp", Schedule::hybrid,
                 backward_problem(DType::bfloat16, 4, kv_heads)};
    both.options.ulysses_degree = ranks % 2 == 0 ? 2 : ranks;
    both.options.direct = kv_heads == 1;
    both.request = {true, kv_heads == 1};
    programs.push_back(both);
  }
  // Rows that go round.
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    programs.push_back({all, "-,sp", "-,sp", Schedule::pass_q, backward_problem(dtype, 4, 4)});
  }
  programs.back().request = {true, true};
  // Parts that are rounded for their way to the owner.
  for (const Schedule schedule : {Schedule::ring, Schedule::allgather, Schedule::ulysses}) {
    for (const bool adds : {false, true}) {
      Program rounded{all, "-,sp", "-,sp", schedule, backward_problem(DType::bfloat16, 4, 1)};
      rounded.options.grad_wire = DType::bfloat16;
      rounded.request.adds = adds;
      programs.push_back(rounded);
    }
  }
  // The gradient of the sinks too.
  for (const Schedule schedule : {Schedule::ring, Schedule::ulysses}) {
    Program sinks{all, "-,sp", "-,sp", schedule, backward_problem(DType::float32, 4, 2)};
    sinks.problem.sinks = Sinks::random(4, 2, 3);
    sinks.request = {true, schedule == Schedule::ring, true};
    programs.push_back(sinks);
    sinks.problem.sinks = Sinks({2}, {0.5F, -1});
    sinks.problem.dtype = DType::bfloat16;
    programs.push_back(sinks);
    sinks.query = "sp,-,tp";
    sinks.kv = "sp,-,tp";
    if (ranks <= 2) programs.push_back(sinks);  // two batches
    // An axis of size 1 makes no other group, whose messages would meet the schedule's.
    programs.push_back(
        {all + ",fsdp=1", "-,fsdp+sp", "-,fsdp+sp", schedule, sinks.problem, sinks.request});
  }
  // A head at a time, of which a window hides most hops.
  Program window{all, "-,sp", "-,sp", Schedule::allgather, backward_problem(DType::float32, 4, 4)};
  window.options.gather_bytes = 1;
  window.problem.mask.set_window(6, 0);
  window.request.grad_lse = true;
  programs.push_back(window);
  window.schedule = Schedule::ring;
  programs.push_back(window);
  // Operands that ranks hold alike.
  programs.push_back({all, "-,-", "-,sp", Schedule::ring, backward_problem(DType::bfloat16, 4, 2)});
  programs.push_back({all, "-,sp", "-,-", Schedule::ring, backward_problem(DType::bfloat16, 4, 2)});
  if (ranks % 2 != 0) return programs;
  const std::string half = "sp=" + std::to_string(ranks / 2);
  for (const bool shared : {false, true}) {
    Program sinks{half + ",tp=2", "-,sp,tp", "-,sp,tp", Schedule::ring,
                  backward_problem(DType::float32, 4, 2)};
    sinks.problem.sinks = shared ? Sinks({2}, {0.5F, -1}) : Sinks::random(4, 2, 3);
    sinks.request.grad_sinks = true;
    programs.push_back(sinks);
  }
  for (const Schedule schedule : {Schedule::ring, Schedule::allgather}) {
    programs.push_back(
        {half + ",x=2", "-,sp+x", "-,sp", schedule, backward_problem(DType::float32, 4, 2)});
  }
  for (const Schedule schedule : {Schedule::ring, Schedule::ulysses}) {
    programs.push_back(
        {half + ",tp=2", "-,sp,tp", "-,sp,tp", schedule, backward_problem(DType::bfloat16, 4, 1)});
  }
  return programs;
}

/// Programs that compute the gradient of a bias too.
inline std::vector<Program> bias_programs(int ranks) {
  const std::string all = "sp=" + std::to_string(ranks);
  constexpr std::int64_t kLength = 23;
  std::vector<Program> programs;
  // Rows or heads of its own or of all, and keys of its own or of all.
  const std::vector<Extents> shapes{{2, 4, kLength, kLength},
                                    {1, 4, kLength, kLength},
                                    {2, 1, kLength, kLength},
                                    {1, 4, 1, kLength},
                                    {2, 1, 1, kLength},
                                    {2, 4, kLength, 1},
                                    {1, 1, 1, 1}};
  for (const Schedule schedule : {Schedule::ring, Schedule::double_ring, Schedule::allgather,
                                  Schedule::ulysses, Schedule::hybrid, Schedule::pass_q}) {
    bool adds = false;
    for (const Extents& shape : shapes) {
      Program program{all, "-,sp", "-,sp", schedule, backward_problem(DType::float32, 4, 2)};
      program.problem.bias = shape;
      program.options.inner_size = ranks % 2 == 0 ? 2 : ranks;
      program.options.ulysses_degree = program.options.inner_size;
      program.request = {adds, adds, false, true};
      adds = !adds;
      programs.push_back(program);
    }
    programs.back().problem.dtype = DType::bfloat16;
  }
  // Operands that ranks hold alike, and ranks with batches of their own.
  for (const auto& [query, kv] :
       {std::pair("-,-", "-,sp"), std::pair("-,sp", "-,-"), std::pair("sp,-", "sp,-")}) {
    if (query == std::string("sp,-") && ranks > 2) continue;
    for (const Extents& shape : shapes) {
      Program program{all, query, kv, Schedule::ring, backward_problem(DType::float32, 4, 2)};
      program.problem.bias = shape;
      program.request.grad_bias = true;
      programs.push_back(program);
    }
  }
  if (ranks % 2 != 0) return programs;
  const std::string half = "sp=" + std::to_string(ranks / 2);
  for (const Schedule schedule : {Schedule::ring, Schedule::ulysses}) {
    for (const Extents& shape : shapes) {
      Program program{half + ",tp=2", "-,sp,tp", "-,sp,tp", schedule,
                      backward_problem(DType::float32, 4, 1)};
      program.problem.bias = shape;
      program.problem.sinks = Sinks({2}, {0.5F, -1});
      program.request = {true, false, true, true};
      programs.push_back(program);
    }
  }
  return programs;
}

inline std::string to_string(const Program& program) {
  return program.mesh + " " + program.query + " " + program.kv + ", " +
         std::string(name_of(program.schedule)) + ", " +
         std::string(annulus::name_of(program.problem.dtype)) +
         (program.problem.bias ? ", bias " + annulus::to_string(*program.problem.bias) : "");
}

}  // namespace annulus::ring::test
