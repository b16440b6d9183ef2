#include <cstdlib>
#include <set>
#include <string>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/environment.hpp>
#include <annulus/core/error.hpp>

#include "tests/support/environment_variable.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

constexpr const char* kName = "ANNULUS_FORCE_NATIVE";

// The variable for one scope.
struct Setting : test::EnvironmentVariable {
  explicit Setting(const char* value) : EnvironmentVariable(kName, value) {}
};

TEST(Environment, TheTableIsWellFormed) {
  std::set<std::string_view> names;
  for (const EnvironmentVariable& variable : environment_variables()) {
    EXPECT_TRUE(variable.name.starts_with("ANNULUS_")) << variable.name;
    EXPECT_FALSE(variable.description.empty()) << variable.name;
    EXPECT_TRUE(names.insert(variable.name).second) << variable.name << " twice";
    if (variable.name == "ANNULUS_LOG_LEVEL") {
      EXPECT_EQ(variable.default_value, "off");
    }
  }
  EXPECT_TRUE(names.contains("ANNULUS_LOG_LEVEL"));
  EXPECT_TRUE(names.contains(kName));
}

TEST(Environment, ValueOrDefault) {
  unsetenv(kName);
  EXPECT_EQ(environment(kName), "0");
  const Setting setting("anything");
  EXPECT_EQ(environment(kName), "anything");
  EXPECT_THROW((void)environment("ANNULUS_NO_SUCH_VARIABLE"), InternalError);
}

TEST(Environment, Flags) {
  unsetenv(kName);
  EXPECT_FALSE(environment_flag(kName));
  for (const char* on : {"1", "on", "true", "yes"}) {
    const Setting setting(on);
    EXPECT_TRUE(environment_flag(kName)) << on;
  }
  for (const char* off : {"", "0", "off", "false", "no"}) {
    const Setting setting(off);
    EXPECT_FALSE(environment_flag(kName)) << off;
  }
  const Setting setting("maybe");
  EXPECT_EQ(test::message_of<UserError>([&] { (void)environment_flag(kName); }),
            std::string(kName) + ": got 'maybe', expected 0 or 1");
}

}  // namespace
}  // namespace annulus
