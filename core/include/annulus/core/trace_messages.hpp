#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <annulus/core/trace.hpp>

/// Finds the two sides of each message in the spans of several ranks.
namespace annulus {

/// Spans of all ranks, by mesh rank, on one clock.
using TraceOfRanks = std::vector<std::vector<TraceSpan>>;

/// A message with both its sides. Messages of the same name, step, sender and receiver match in the
/// order in which they were posted (see Group), and `index` counts them.
struct TraceFlow {
  struct Side {
    std::size_t rank = 0;
    std::size_t span = 0;  ///< among the rank's spans
  };
  Side sender;
  Side receiver;
  std::size_t index = 0;
};

/// Every message that both of its ranks have recorded, in an order that depends only on the
/// messages.
[[nodiscard]] std::vector<TraceFlow> flows_of(const TraceOfRanks& ranks);

/// Changes the begin of transfer spans from the posting to the moment when messages move: when both
/// sides have posted the first message that the span receives, or sends if it receives none. A
/// message that was sent into a buffer before its receiver was ready is not changed.
void begin_when_moving(TraceOfRanks& ranks);

/// Writes spans as bytes, to be sent to another rank.
[[nodiscard]] std::string pack_spans(const std::vector<TraceSpan>& spans);
/// Throws InternalError for bytes that are not spans.
[[nodiscard]] std::vector<TraceSpan> unpack_spans(const std::string& bytes);

}  // namespace annulus
