#include <cstdlib>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/log.hpp>

namespace annulus {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;

// Formatting it is noticed.
struct Counted {
  int* times;
};

// The level is read from the environment once per process: info, as tests/core/CMakeLists.txt says.
std::string written(const auto& body) {
  ::testing::internal::CaptureStderr();
  body();
  return ::testing::internal::GetCapturedStderr();
}

}  // namespace
}  // namespace annulus

template <>
struct fmt::formatter<annulus::Counted> : fmt::formatter<int> {
  auto format(const annulus::Counted& counted, format_context& context) const {
    return fmt::formatter<int>::format(++*counted.times, context);
  }
};

namespace annulus {
namespace {

TEST(Log, TellsWhatTheLevelAsksFor) {
  ASSERT_STREQ(std::getenv("ANNULUS_LOG_LEVEL"), "info");
  EXPECT_TRUE(logs(LogLevel::info));
  EXPECT_FALSE(logs(LogLevel::debug));
  EXPECT_THAT(written([] { log_info("mesh {}", "sp=4"); }),
              MatchesRegex("\\[annulus [0-9:.]+ info\\] mesh sp=4\n"));
  EXPECT_THAT(written([] { log_debug("choice"); }), IsEmpty());
}

TEST(Log, FormatsNothingInVain) {
  int times = 0;
  EXPECT_THAT(written([&] { log_debug("{}", Counted{&times}); }), IsEmpty());
  EXPECT_EQ(times, 0);
  EXPECT_THAT(written([&] { log_info("{}", Counted{&times}); }), HasSubstr("] 1\n"));
}

TEST(Log, BracesOfTheTextAreText) {
  EXPECT_THAT(written([] { write_log(LogLevel::info, "{} is no argument"); }),
              HasSubstr("] {} is no argument\n"));
}

TEST(Log, NamesTheRank) {
  set_log_rank(3);
  EXPECT_THAT(written([] { log_info("here"); }),
              MatchesRegex("\\[annulus [0-9:.]+ rank 3 info\\] here\n"));
}

}  // namespace
}  // namespace annulus
