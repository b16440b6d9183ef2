#include <fmt/format.h>

#include <annulus/attention/modifiers.hpp>

namespace annulus {

namespace {

// Scale, bias, dense mask and modifiers; empty if none is set.
std::string list_of(const AttentionProblem& problem) {
  std::string text;
  const auto add = [&text](const std::string& modifier) {
    text += (text.empty() ? "" : ", ") + modifier;
  };
  if (problem.scale) add(fmt::format("scale {}", *problem.scale));
  if (problem.soft_cap) add(fmt::format("soft cap {}", *problem.soft_cap));
  if (problem.bias) add("bias " + to_string(*problem.bias));
  if (problem.dense_mask) add("dense mask " + to_string(*problem.dense_mask));
  if (problem.sinks) add(to_string(*problem.sinks));
  if (problem.dropout) add(to_string(*problem.dropout));
  if (!problem.normalize_output) add("unnormalised");
  return text;
}

}  // namespace

std::string modifiers_text(const AttentionProblem& problem) {
  const std::string text = list_of(problem);
  return text.empty() ? "none" : text;
}

std::string mask_and_modifiers_text(const AttentionProblem& problem) {
  const std::string text = list_of(problem);
  return to_string(problem.mask) + (text.empty() ? "" : ", " + text);
}

}  // namespace annulus
