#include <array>
#include <string>

#include <annulus/attention/problem.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

constexpr std::array kPolicies{BiasPolicy::combine, BiasPolicy::bias_wins,
                               BiasPolicy::bias_disables_causal};

}  // namespace

std::string_view name_of(BiasPolicy policy) noexcept {
  constexpr std::array<std::string_view, kPolicies.size()> kNames{"combine", "bias_wins",
                                                                  "bias_disables_causal"};
  return kNames[static_cast<std::size_t>(policy)];
}

BiasPolicy parse_bias_policy(std::string_view name) {
  for (const BiasPolicy policy : kPolicies) {
    if (name_of(policy) == name) return policy;
  }
  throw ArgumentError("bias policy", std::string(name),
                      "combine, bias_wins or bias_disables_causal");
}

Mask mask_beside_bias(BiasPolicy policy, const Mask& mask) {
  if (policy == BiasPolicy::bias_wins) return {};
  Mask left = mask;
  if (policy == BiasPolicy::bias_disables_causal) left.set_causal(false);
  return left;
}

AttentionProblem under_policy(BiasPolicy policy, AttentionProblem problem) {
  if (!problem.bias) return problem;
  problem.mask = mask_beside_bias(policy, problem.mask);
  if (policy == BiasPolicy::bias_wins) problem.dense_mask.reset();
  return problem;
}

}  // namespace annulus
