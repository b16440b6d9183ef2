#include <string>

#include <gtest/gtest.h>

#include <annulus/core/json_nesting.hpp>

namespace annulus {
namespace {

std::string nested(int depth) {
  std::string text;
  for (int i = 0; i < depth; ++i) text += i % 2 == 0 ? "[" : "{\"k\":";
  for (int i = depth; i-- > 0;) text += i % 2 == 0 ? ']' : '}';
  return text;
}

TEST(JsonNesting, CountsOpenBrackets) {
  EXPECT_FALSE(nests_too_deep(""));
  EXPECT_FALSE(nests_too_deep(nested(kMaximumJsonNesting)));
  EXPECT_TRUE(nests_too_deep(nested(kMaximumJsonNesting + 1)));
  EXPECT_TRUE(nests_too_deep(std::string(100000, '[')));
}

TEST(JsonNesting, ForgetsClosedBrackets) {
  std::string list = "[";
  for (int i = 0; i < 10 * kMaximumJsonNesting; ++i) list += "[],{},";
  EXPECT_FALSE(nests_too_deep(list + "0]"));
}

TEST(JsonNesting, DoesNotCountInStrings) {
  const std::string brackets(2 * kMaximumJsonNesting, '[');
  EXPECT_FALSE(nests_too_deep("[\"" + brackets + "\"]"));
  EXPECT_FALSE(nests_too_deep("[\"\\\"" + brackets + "\"]"));
  EXPECT_TRUE(nests_too_deep("[\"\\\\\"," + brackets));
}

}  // namespace
}  // namespace annulus
