#pragma once

#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/sharded_attention.hpp>

namespace annulus {

/// The options of ShardedAttention, forward or backward, from Attention's options.
[[nodiscard]] ring::ShardedAttentionOptions sharded_options(const AttentionOptions& options,
                                                            Context& context);
[[nodiscard]] ring::ShardedAttentionOptions backward_options(const AttentionOptions& options,
                                                             Context& context);

}  // namespace annulus
