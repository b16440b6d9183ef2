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

/// `input` was made from `options`; `schedule` is the one that these stand for, or "auto".
[[nodiscard]] OpenChoices open_choices(const ShardedAttentionOptions& options,
                                       const PlanInput& input, const std::string& schedule,
                                       Place place);

/// The options with what their overlay sets, as if the caller had named it, where nothing was
/// named. Their overlay is then the part of it that counted.
[[nodiscard]] ShardedAttentionOptions under_overlay(ShardedAttentionOptions options, Place place);

/// The options with a choice of the chain. Its implementation is preferred, and others compute what
/// it does not take, so that only lack of memory can make a choice fail where `auto` would not.
[[nodiscard]] ShardedAttentionOptions with_choice(ShardedAttentionOptions options,
                                                  const Choice& choice, Place place);
/// The same for what plans are made from. An open transport stays as it is.
[[nodiscard]] PlanInput with_choice(PlanInput input, const Choice& choice);

}  // namespace annulus::ring
