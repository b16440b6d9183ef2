#include <fmt/format.h>

#include <annulus/attention/modifiers.hpp>

namespace annulus {

std::string modifiers_text(const AttentionProblem& problem) {
  std::string text;
  const auto add = [&text](const std::string& modifier) {
    text += (text.empty() ? "" : ", ") + modifier;
  };
  if (problem.scale) add(fmt::format("scale {}", *problem.scale));
  if (problem.soft_cap) add(fmt::format("soft cap {}", *problem.soft_cap));
  if (problem.sinks) add(to_string(*problem.sinks));
  if (problem.dropout) add(to_string(*problem.dropout));
  return text.empty() ? "none" : text;
}

}  // namespace annulus
