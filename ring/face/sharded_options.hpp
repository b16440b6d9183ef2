#pragma once

#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/sharded_attention.hpp>

namespace annulus {

/// What ShardedAttention is asked for by the options of Attention: forward and backward.
[[nodiscard]] ring::ShardedAttentionOptions sharded_options(const AttentionOptions& options,
                                                            Context& context);
[[nodiscard]] ring::ShardedAttentionOptions backward_options(const AttentionOptions& options,
                                                             Context& context);

}  // namespace annulus
