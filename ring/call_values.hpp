#pragma once

#include <cstdint>

#include <annulus/attention/problem.hpp>
#include <annulus/ring/local_tensors.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// True if `mask` is `planned` but for lengths and offsets that are call arguments of the problem,
/// and the lengths are within those of `planned`: its plan then serves calls with `mask`.
[[nodiscard]] bool differs_in_values_only(const Mask& mask, const AttentionProblem& planned);

/// Sets the call arguments of `problem`, a copy of `planned`: those of the global `batches` to what
/// `values` say, and the others to those of `mask` and of planned.dropout. Values may lie on the
/// host, and in the memory of `device`, where they are not read and count as not given. Checks the
/// sinks of a rank with `heads` heads, and leaves those of `problem` as they are. Throws
/// ArgumentError for a value that is not an argument of calls, or one that the plan does not allow.
void apply_values(const CallValues& values, const AttentionProblem& planned, const Mask& mask,
                  BatchRange batches, std::int64_t heads, Place device, AttentionProblem& problem);

/// The sinks `planned`, with those of a call, in host memory, for the global `heads`.
[[nodiscard]] Sinks called_sinks(const Sinks& planned, const ConstTensorView& called,
                                 HeadRange heads);

}  // namespace annulus::ring
