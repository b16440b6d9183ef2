#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <annulus/core/trace_messages.hpp>
#include <annulus/files/text_file.hpp>
#include <annulus/mesh/mesh.hpp>

#include "launcher/report/report.hpp"

namespace annulus::launcher {

/// Readings of a rank's clock before and after barriers of all ranks. They serve to compare the
/// clocks of two nodes, which count from different moments.
struct ClockSamples {
  std::vector<std::int64_t> before;
  std::vector<std::int64_t> after;
};

/// Collective over the group: `rounds` barriers.
[[nodiscard]] ClockSamples sample_clock(Control& group, int rounds,
                                        const std::function<std::int64_t()>& clock);

/// The lead of a clock over another one. No rank leaves a barrier before all have entered it, so
/// each round bounds the answer from both sides. Returns the middle of the interval that all rounds
/// allow.
[[nodiscard]] std::int64_t clock_offset(const ClockSamples& clock, const ClockSamples& reference);

/// The spans of all ranks, on rank 0; nothing on the others. All times are by rank 0's clock, and
/// transfers begin when they move. Collective over the mesh.
[[nodiscard]] TraceOfRanks gather_trace(const std::vector<TraceSpan>& spans, Mesh& mesh);

/// The file of --trace: one Chrome trace-event file of all ranks, written by rank 0.
class TraceFile {
 public:
  /// Collective over `group`. Opens a temporary file beside `path`; all ranks throw UserError if
  /// that fails.
  TraceFile(const std::string& path, Control& group);
  /// Collective. `ranks` come from gather_trace(); the report's meta data and record describe the
  /// trace. Throws LibraryError naming the option.
  void commit(const TraceOfRanks& ranks, const Report& report);

 private:
  Control& group_;
  std::string shown_;
  std::optional<files::TextFile> file_;  // rank 0 only
};

}  // namespace annulus::launcher
