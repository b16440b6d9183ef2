#include <cstdlib>
#include <set>
#include <string>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/environment.hpp>
#include <annulus/core/error.hpp>

#include "tests/support/thrown_by.hpp"

namespace annulus {
namespace {

// Sets a variable for one scope.
class Setting {
 public:
  explicit Setting(const char* value) { setenv(kName, value, 1); }
  ~Setting() { unsetenv(kName); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
  static constexpr const char* kName = "ANNULUS_FORCE_NATIVE";
};

TEST(Environment, TheTableIsWellFormed) {
  std::set<std::string_view> names;
  for (const EnvironmentVariable& variable : environment_variables()) {
    EXPECT_TRUE(variable.name.starts_with("ANNULUS_")) << variable.name;
    EXPECT_FALSE(variable.description.empty()) << variable.name;
    EXPECT_TRUE(names.insert(variable.name).second) << variable.name << " twice";
  }
  EXPECT_TRUE(names.contains("ANNULUS_LOG_LEVEL"));
  EXPECT_TRUE(names.contains(Setting::kName));
}

TEST(Environment, ValueOrDefault) {
  unsetenv(Setting::kName);
  EXPECT_EQ(environment(Setting::kName), "0");
  const Setting setting("anything");
  EXPECT_EQ(environment(Setting::kName), "anything");
  EXPECT_THROW((void)environment("ANNULUS_NO_SUCH_VARIABLE"), InternalError);
}

TEST(Environment, Flags) {
  unsetenv(Setting::kName);
  EXPECT_FALSE(environment_flag(Setting::kName));
  for (const char* on : {"1", "on", "true", "yes"}) {
    const Setting setting(on);
    EXPECT_TRUE(environment_flag(Setting::kName)) << on;
  }
  for (const char* off : {"", "0", "off", "false", "no"}) {
    const Setting setting(off);
    EXPECT_FALSE(environment_flag(Setting::kName)) << off;
  }
  const Setting setting("maybe");
  const auto error =
      test::thrown_by<ArgumentError>([&] { (void)environment_flag(Setting::kName); });
  EXPECT_EQ(error.argument(), Setting::kName);
  EXPECT_EQ(error.value(), "'maybe'");
}

}  // namespace
}  // namespace annulus
