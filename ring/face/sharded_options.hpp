#pragma once

#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/sharded_attention.hpp>

namespace annulus {

/// True if init_bias is called.
[[nodiscard]] bool makes_bias(const AttentionOptions& options);
/// The problem that is computed: with the bias that init_bias makes, under the bias policy.
[[nodiscard]] AttentionProblem problem_of(const AttentionOptions& options);

/// The options of ShardedAttention, forward or backward, from Attention's options.
[[nodiscard]] ring::ShardedAttentionOptions sharded_options(const AttentionOptions& options,
                                                            Context& context);
[[nodiscard]] ring::ShardedAttentionOptions backward_options(const AttentionOptions& options,
                                                             Context& context);

}  // namespace annulus
