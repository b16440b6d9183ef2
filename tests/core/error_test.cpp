#include <cerrno>
#include <type_traits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

namespace annulus {
namespace {

using ::testing::HasSubstr;

TEST(Error, TreeAndExitCodes) {
  static_assert(std::is_base_of_v<std::runtime_error, Error>);
  static_assert(std::is_abstract_v<Error>);
  static_assert(!std::is_base_of_v<UserError, LibraryError>);
  for (const ExitCode code : {UserError("x").exit_code(), ArgumentError("a", "b", "c").exit_code(),
                              FileError("f", "p").exit_code(), UnsupportedError("x").exit_code()}) {
    EXPECT_EQ(static_cast<int>(code), 2);
  }
  for (const ExitCode code : {LibraryError("x").exit_code(), SystemError("x", EIO).exit_code(),
                              TimeoutError("x").exit_code(), InternalError("x").exit_code()}) {
    EXPECT_EQ(static_cast<int>(code), 3);
  }
  EXPECT_EQ(static_cast<int>(ExitCode::success), 0);
  EXPECT_EQ(static_cast<int>(ExitCode::wrong_numbers), 4);
}

TEST(Error, ArgumentErrorNamesArgumentValueAndExpectation) {
  const ArgumentError error("window", "-3", "-1 or more");
  EXPECT_STREQ(error.what(), "window: got -3, expected -1 or more");
  EXPECT_EQ(error.argument(), "window");
  EXPECT_EQ(error.value(), "-3");
  EXPECT_EQ(error.expected(), "-1 or more");
}

TEST(Error, FileErrorNamesThePath) {
  const FileError error("q.npy", "too short");
  EXPECT_STREQ(error.what(), "q.npy: too short");
  EXPECT_EQ(error.path(), "q.npy");
}

TEST(Error, OtherMessages) {
  EXPECT_THAT(SystemError("open out.npy", ENOENT).what(), HasSubstr("open out.npy: No such file"));
}

}  // namespace
}  // namespace annulus
