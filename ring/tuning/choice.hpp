#pragma once

#include <annulus/ring/sharded_attention.hpp>

namespace annulus::ring {

/// The choices that a call leaves to the chain.
struct OpenChoices {
  bool implementation = false;
  bool schedule = false;
  bool transport = false;
  bool ulysses_degree = false;
  bool inner_size = false;
  bool head_groups = false;

  [[nodiscard]] bool any() const {
    return implementation || schedule || transport || ulysses_degree || inner_size || head_groups;
  }
};

/// `input` was made from `options`; `schedule` is the one that these resolve to, or "auto".
[[nodiscard]] OpenChoices open_choices(const ShardedAttentionOptions& options,
                                       const PlanInput& input, const std::string& schedule,
                                       Place place);

/// The options, with open members filled in from their overlay. Their overlay is reduced to the
/// part that was used.
[[nodiscard]] ShardedAttentionOptions under_overlay(ShardedAttentionOptions options, Place place);

/// The options with a choice of the chain. Its implementation is only preferred; others compute the
/// blocks that it does not take. So a choice can fail where `auto` would not only for lack of
/// memory.
[[nodiscard]] ShardedAttentionOptions with_choice(ShardedAttentionOptions options,
                                                  const Choice& choice, Place place);
/// The same for the planner's input. An open transport stays as it is.
[[nodiscard]] PlanInput with_choice(PlanInput input, const Choice& choice);

}  // namespace annulus::ring
