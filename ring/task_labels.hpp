#pragma once

#include <string>

#include <annulus/core/trace.hpp>
#include <annulus/ring/plan.hpp>

/// Tasks in traces, reports and messages.
namespace annulus::ring {

/// The contents of a buffer: "key/value".
[[nodiscard]] std::string contents_of(const Buffer& buffer);
/// The contents of an exchange's messages: "key/value"; "nothing" if there are none.
[[nodiscard]] std::string contents_of(const RankPlan& plan, const Exchange& exchange);

/// The label of a task in real and simulated runs, without the task's messages.
[[nodiscard]] TraceLabel trace_label(const RankPlan& plan, const Task& task);

}  // namespace annulus::ring
