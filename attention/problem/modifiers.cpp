#include <fmt/format.h>

#include <annulus/attention/modifiers.hpp>

namespace annulus {

std::vector<Modifier> modifiers_of(const AttentionProblem& problem) {
  // One field more, and this does not compile.
  const auto& [shape, dtype, scale, soft_cap, mask, sinks, dropout, softmax_dtype, bias, dense_mask,
               weights, normalize_output, call_arguments, reproducible] = problem;
  std::vector<Modifier> all;
  if (dense_mask) {
    const std::string text = "dense mask " + to_string(*dense_mask);
    all.push_back({text, text});
  }
  if (scale) all.push_back({fmt::format("scale {}", *scale), ""});
  if (soft_cap) all.push_back({fmt::format("soft cap {}", *soft_cap), "soft cap"});
  if (bias) {
    const std::string text = "bias " + to_string(*bias);
    all.push_back({text, text});
  }
  if (sinks) {
    all.push_back({to_string(*sinks), fmt::format("{} sinks", sinks->per_head()), sinks->digest()});
  }
  if (dropout) all.push_back({to_string(*dropout), "dropout"});
  if (!normalize_output) all.push_back({"unnormalised", "unnormalised"});
  if (softmax_dtype != DType::float32) {
    const std::string text = fmt::format("softmax {}", name_of(softmax_dtype));
    all.push_back({text, text});
  }
  if (weights) all.push_back({"weights", "weights"});
  if (call_arguments.any()) {
    const std::string text = "call arguments " + to_string(call_arguments);
    all.push_back({text, text});
  }
  if (reproducible) {
    const std::string text = fmt::format("reproducible {}", name_of(*reproducible));
    all.push_back({text, text});
  }
  return all;
}

std::string modifiers_text(const AttentionProblem& problem) {
  std::string text;
  for (const Modifier& one : modifiers_of(problem)) text += (text.empty() ? "" : ", ") + one.text;
  return text.empty() ? "none" : text;
}

std::string mask_and_modifiers_text(const AttentionProblem& problem) {
  const std::string modifiers = modifiers_text(problem);
  std::string mask = to_string(problem.mask);
  if (mask == "none") mask = "no mask";
  // Beside a dense mask, "no mask" would be wrong.
  if (problem.dense_mask && !problem.mask.hides_any()) return modifiers;
  return modifiers == "none" ? mask : mask + ", " + modifiers;
}

}  // namespace annulus
