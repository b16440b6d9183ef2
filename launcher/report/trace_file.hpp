#pragma once

#include <optional>
#include <string>
#include <vector>

#include <annulus/core/trace.hpp>
#include <annulus/files/text_file.hpp>
#include <annulus/mesh/control.hpp>

namespace annulus::launcher {

/// The file of --trace: one Chrome trace-event file of all ranks, written by rank 0.
class TraceFile {
 public:
  /// Collective over `group`. Opens a temporary file beside `path`; all ranks throw UserError if
  /// that fails.
  TraceFile(const std::string& path, Control& group);
  /// Collective. Times count from the earliest span of any rank. Throws SystemError.
  void commit(const std::vector<TraceSpan>& spans);

 private:
  Control& group_;
  std::optional<files::TextFile> file_;  // rank 0 only
};

}  // namespace annulus::launcher
