#pragma once

#include <annulus/ring/context.hpp>
#include <annulus/verification/gradient_verification.hpp>
#include <annulus/verification/verification.hpp>

#include "forward_run.hpp"

namespace annulus::verification {

/// Computes the gradients of a case twice from its forward pass, and once from an unsharded forward
/// pass, with both sequences whole on every rank; see verify_sharded(). `with_all_columns` is the
/// case with whole keys and values. `rounded`: partial results of the forward pass were rounded.
/// Collective over the context.
[[nodiscard]] GradientVerification verify_gradients(const ShardedCase& sharded_case,
                                                    const ShardedCase& with_all_columns,
                                                    ForwardRun& forward, bool rounded,
                                                    Context& context, const Phase& phase);

}  // namespace annulus::verification
