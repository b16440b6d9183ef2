#include "launcher/report/trace_file.hpp"

#include <annulus/core/chrome_trace.hpp>
#include <annulus/mesh/agreement.hpp>

#include "launcher/options/as_option.hpp"

namespace annulus::launcher {

TraceFile::TraceFile(const std::string& path, Control& group) : group_(group) {
  collectively(group_, [&] {
    if (group_.rank() != 0) return;
    as_option("--trace " + path, [&] { file_.emplace(path); });
  });
}

void TraceFile::commit(const std::vector<TraceSpan>& spans) {
  const std::vector<std::string> packed = group_.collect_text(pack_spans(spans));
  collectively(group_, [&] {
    if (group_.rank() != 0) return;
    TraceOfRanks ranks;
    for (const std::string& bytes : packed) ranks.push_back(unpack_spans(bytes));
    begin_when_moving(ranks);
    file_->commit(chrome_trace(ranks, {}));
  });
}

}  // namespace annulus::launcher
