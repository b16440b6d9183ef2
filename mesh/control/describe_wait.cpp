#include "control/describe_wait.hpp"

#include <fmt/format.h>

namespace annulus {

std::string describe_wait(const Messenger::Call& call, int peer, std::optional<int> absent,
                          const std::function<std::string(int rank)>& name_of) {
  const auto wait = [&](const std::string& who) {
    return fmt::format("{}: waiting for {} to {}", call.what, who, call.deed);
  };
  if (absent && (call.by_all || *absent == peer)) return wait(name_of(*absent));
  const std::string text = wait(name_of(peer) + ", which still responds,");
  if (!absent) return text;
  return fmt::format("{}; no response from {}", text, name_of(*absent));
}

}  // namespace annulus
