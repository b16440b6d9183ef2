#pragma once

#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "launcher/options/option_values.hpp"
#include "launcher/options/options.hpp"
#include "tests/support/environment_variable.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/scratch_directory.hpp"

namespace annulus::launcher {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Variable = test::EnvironmentVariable;

/// A file that an option names, for the duration of a test.
class OptionFile {
 public:
  explicit OptionFile(const std::string& text) { test::write_bytes(path_, text); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  test::ScratchDirectory folder_;
  std::string path_ = folder_.file("options.cfg");
};

/// The words between single spaces.
inline std::vector<std::string> words_of(const std::string& line) {
  if (line.empty()) return {};
  const std::vector<std::string_view> words = split(line, ' ');
  return {words.begin(), words.end()};
}

inline Options parse(const std::string& line) {
  std::string help;
  auto options = parse_options(words_of(line), help);
  EXPECT_TRUE(options.has_value());
  EXPECT_EQ(help, "");
  return std::move(options).value();
}

inline std::string help_of(const std::string& line = "") {
  std::string help;
  EXPECT_FALSE(parse_options(words_of(line), help).has_value());
  return help;
}

/// The message of the UserError that parsing throws.
inline std::string error_of(const std::string& line) {
  std::string help;
  return test::message_of<UserError>(
      [&] { static_cast<void>(parse_options(words_of(line), help)); });
}

}  // namespace annulus::launcher
