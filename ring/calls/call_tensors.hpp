#pragma once

#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/ring/runner.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// The problem's tensors of a call, by content, for a runner. Throws ArgumentError for a tensor
/// that the problem does not have.
[[nodiscard]] std::vector<CallTensor> by_content(const LocalTensors& tensors,
                                                 const AttentionProblem& problem);
/// The same for a call of the backward pass.
[[nodiscard]] std::vector<CallTensor> by_content(const BackwardLocalTensors& tensors,
                                                 const AttentionProblem& problem,
                                                 const BackwardRequest& request);

}  // namespace annulus::ring
