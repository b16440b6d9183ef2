// The value of an option, by every reader of values.

#include <cmath>

#include <annulus/attention/problem.hpp>

#include "fuzzing.hpp"
#include "launcher/options/option_values.hpp"

using namespace annulus;
using namespace annulus::launcher;
using namespace annulus::test;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = text_of(data, size);
  const std::string option = "--option";
  if (const auto value = taken([&] { return parse_integer(option, text, -7, 7); })) {
    require(*value >= -7 && *value <= 7, "whole numbers are within their limits");
  }
  if (const auto value = taken([&] { return parse_seed(option, text); })) {
    require(parse_seed(option, std::to_string(*value)) == *value, "a seed is what its text says");
  }
  if (const auto value = taken([&] { return parse_number(option, text); })) {
    require(std::isfinite(*value), "numbers are finite");
  }
  if (const auto value = taken([&] { return parse_positive(option, text); })) {
    require(std::isfinite(*value) && *value > 0, "positive numbers are");
  }
  if (const auto value = taken([&] { return parse_bytes(option, text); })) {
    require(*value >= 1, "bytes are one or more");
  }
  if (const auto value = seconds_of_text(text)) {
    require(std::isfinite(*value) && *value > 0, "times are positive");
  }
  (void)taken([&] { return parse_flag(option, text); });
  (void)taken([&] { return parse_choice(option, text, {"ring", "allgather"}); });
  if (const auto shape = taken([&] { return parse_shape(option, text); })) {
    const bool valid = taken([&] {
                         shape->validate();
                         return true;
                       }).has_value();
    if (valid) {
      require(shape->heads % shape->kv_heads == 0, "heads are a multiple of key/value heads");
      require(shape->query_length >= 0 && shape->kv_length >= 0, "lengths are not negative");
    }
  }
  if (const auto window = taken([&] { return parse_window(option, text); })) {
    require(window->left >= -1 && window->right >= -1, "a window is a size or unlimited");
  }
  if (const auto block = taken([&] { return parse_block_size(option, text); })) {
    require(block->query >= 1 && block->kv >= 1, "blocks are not empty");
  }
  (void)taken([&] { return parse_causal_offset(option, text); });
  if (const auto sweep = taken([&] { return parse_sweep(option, text); })) {
    require(sweep->begin >= 1 && sweep->begin <= sweep->end && sweep->factor >= 2,
            "a sweep grows from its begin to its end");
    int steps = 0;
    for (std::int64_t at = sweep->begin; at <= sweep->end; at *= sweep->factor) ++steps;
    require(steps >= 1 && steps < 64, "a sweep ends");
  }
  if (const auto found = taken([&] { return parse_random_case(option, text); })) {
    require(found->index >= 0, "cases count from 0");
  }
  return 0;
}
