#include <vector>

#include <fmt/format.h>

#include <annulus/ring/transfer_wait.hpp>

namespace annulus::ring {

std::string describe_transfers(const RankPlan& plan, std::uint32_t mark, bool one_sided) {
  for (std::size_t s = 0; s < plan.steps.size(); ++s) {
    const bool taking = mark == taking_mark(s);
    if (!taking && mark != taken_mark(s)) continue;
    std::vector<std::string> parts;
    if (taking) {
      for (const Transfer& receive : plan.steps[s].receives) {
        parts.push_back(fmt::format("{} bytes from rank {}", receive.bytes, receive.peer));
      }
    }
    if (taking != one_sided) {
      for (const Transfer& send : plan.steps[s].sends) {
        parts.push_back(fmt::format("rank {} to take {} bytes", send.peer, send.bytes));
      }
    }
    if (parts.empty()) return {};
    return fmt::format("step {}: waiting for {}: {}", s, name_of(Payload::key_value),
                       fmt::join(parts, ", "));
  }
  return {};
}

}  // namespace annulus::ring
