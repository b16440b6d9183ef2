#pragma once

#include <string>
#include <utility>
#include <vector>

#include <annulus/core/trace_messages.hpp>

namespace annulus {

/// A Chrome trace-event file (JSON object format) that Perfetto opens: a process per rank, a row
/// per stream, and separate rows for sends and receives; spans that overlap without being nested
/// get further rows. Arrows lead from the sender's span of a message to the receiver's. Times count
/// from the earliest span. `about` becomes "otherData", which viewers show as information on the
/// trace.
[[nodiscard]] std::string chrome_trace(
    const TraceOfRanks& ranks, const std::vector<std::pair<std::string, std::string>>& about);

}  // namespace annulus
