#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <annulus/core/trace.hpp>

namespace annulus::launcher {

/// The spans of one rank, for a picture.
struct TimelineRow {
  int rank = 0;
  const std::vector<TraceSpan>* spans = nullptr;
};

/// The most ranks of a picture. If there are more, show a selection: see spread_ranks().
inline constexpr int kMaximumPicturedRanks = 256;

/// At most `most` of the ranks from 0 to `ranks` − 1, in order: the first, the last, and others at
/// equal distances.
[[nodiscard]] std::vector<int> spread_ranks(int ranks, int most);

/// Ranks × time, as SVG. Each rank has a row: its upper part shows computing and waiting, the lower
/// part messages on their way. If a row has more spans than pixels, each pixel shows the kind that
/// took most of its time. `title` goes above, `note` below. Time counts from 0 ns.
[[nodiscard]] std::string timeline_picture(const std::vector<TimelineRow>& rows,
                                           const std::string& title, const std::string& note);

}  // namespace annulus::launcher
