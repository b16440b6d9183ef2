#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/one_at_a_time.hpp>

#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

TEST(OneAtATime, NamesBothCallsThatOverlap) {
  OneAtATime calls("a thing");
  const auto run_on_a_thread = [&] {
    std::string message;
    std::thread([&] {
      message = test::message_of<LibraryError>([&] { (void)calls.begin("run"); });
    }).join();
    return message;
  };
  {
    const OneAtATime::Call outer = calls.begin("prepare");
    { const OneAtATime::Call nested = calls.begin("wait"); }
    EXPECT_THAT(run_on_a_thread(),
                ::testing::MatchesRegex("run on thread [0-9a-f]+ during prepare on thread "
                                        "[0-9a-f]+: one thread at a time may call a thing"));
  }
  bool done = false;
  std::thread([&] {
    const OneAtATime::Call call = calls.begin("run");
    done = true;
  }).join();
  EXPECT_TRUE(done);
}

}  // namespace
}  // namespace annulus
