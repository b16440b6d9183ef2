#pragma once

#include <cstdio>
#include <fstream>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "launcher/options/options.hpp"
#include "tests/support/environment_variable.hpp"

namespace annulus::launcher {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Variable = test::EnvironmentVariable;
using Words = std::vector<std::string>;

/// A file that an option names, for the duration of a test.
class OptionFile {
 public:
  explicit OptionFile(const std::string& text)
      : path_(::testing::TempDir() + "annulus_options_" + std::to_string(::getpid()) + "_" +
              std::to_string(++made) + ".cfg") {
    std::ofstream(path_) << text;
  }
  ~OptionFile() { std::remove(path_.c_str()); }
  OptionFile(const OptionFile&) = delete;
  OptionFile& operator=(const OptionFile&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  static inline int made = 0;
  std::string path_;
};

inline Words joined(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

inline Options parse(const Words& words) {
  std::string help;
  auto options = parse_options(words, help);
  EXPECT_TRUE(options.has_value());
  EXPECT_EQ(help, "");
  return std::move(options).value();
}

inline std::string help_of(const Words& words) {
  std::string help;
  EXPECT_FALSE(parse_options(words, help).has_value());
  return help;
}

/// The message of the UserError that parsing throws.
inline std::string error_of(const Words& words) {
  std::string help;
  try {
    static_cast<void>(parse_options(words, help));
  } catch (const UserError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace annulus::launcher
