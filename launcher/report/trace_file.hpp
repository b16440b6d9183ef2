#pragma once

#include <optional>
#include <string>
#include <vector>

#include <annulus/core/trace_messages.hpp>
#include <annulus/files/text_file.hpp>
#include <annulus/mesh/mesh.hpp>

#include "launcher/report/report.hpp"

namespace annulus::launcher {

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
