#include <fmt/format.h>

#include <annulus/attention/modifiers.hpp>

namespace annulus {

namespace {

void add(std::string& list, const std::string& item) {
  list += (list.empty() ? "" : ", ") + item;
}

// Adds scale, bias and modifiers, as far as they are set.
void add_modifiers(std::string& list, const AttentionProblem& problem) {
  if (problem.scale) add(list, fmt::format("scale {}", *problem.scale));
  if (problem.soft_cap) add(list, fmt::format("soft cap {}", *problem.soft_cap));
  if (problem.bias) add(list, "bias " + to_string(*problem.bias));
  if (problem.sinks) add(list, to_string(*problem.sinks));
  if (problem.dropout) add(list, to_string(*problem.dropout));
  if (!problem.normalize_output) add(list, "unnormalised");
  if (problem.softmax_dtype != DType::float32) {
    add(list, fmt::format("softmax {}", name_of(problem.softmax_dtype)));
  }
}

void add_dense_mask(std::string& list, const AttentionProblem& problem) {
  if (problem.dense_mask) add(list, "dense mask " + to_string(*problem.dense_mask));
}

}  // namespace

std::string modifiers_text(const AttentionProblem& problem) {
  std::string text;
  add_dense_mask(text, problem);
  add_modifiers(text, problem);
  return text.empty() ? "none" : text;
}

std::string mask_and_modifiers_text(const AttentionProblem& problem) {
  // Beside a dense mask, "none" would be wrong.
  const bool dense_alone = problem.dense_mask && !problem.mask.hides_any();
  std::string text = dense_alone ? "" : to_string(problem.mask);
  add_dense_mask(text, problem);
  add_modifiers(text, problem);
  return text;
}

}  // namespace annulus
