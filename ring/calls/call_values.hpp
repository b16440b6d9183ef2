#pragma once

#include <cstdint>

#include <annulus/attention/problem.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// True if `mask` differs from the mask of `planned` only in lengths and offsets that are call
/// arguments, and no length exceeds the planned one. The plan then serves calls with `mask`.
[[nodiscard]] bool differs_in_values_only(const Mask& mask, const AttentionProblem& planned);

/// Sets the call arguments of `problem`, a copy of `planned`. For the global `batches` they come
/// from `values`, otherwise from `mask` and planned.dropout. Values may lie on the host or in the
/// memory of `device`; device values are not read and count as absent. Checks the sinks of a rank
/// with `heads` heads, but does not set them. Throws ArgumentError for a value that is not a call
/// argument, or that the plan does not allow.
void apply_values(const CallValues& values, const AttentionProblem& planned, const Mask& mask,
                  BatchRange batches, std::int64_t heads, Place device, AttentionProblem& problem);

/// The sinks `planned`, with the global `heads` replaced by a call's sinks, in host memory.
[[nodiscard]] Sinks called_sinks(const Sinks& planned, const ConstTensorView& called,
                                 HeadRange heads);

}  // namespace annulus::ring
