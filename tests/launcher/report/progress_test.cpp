#include "launcher/report/progress.hpp"

#include <chrono>
#include <cstdlib>
#include <fcntl.h>
#include <string>
#include <thread>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace annulus::launcher {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Progress, TheLineEstimatesWhatIsLeft) {
  EXPECT_EQ(Progress::line("200 problems", 50, 200, 10),
            "annulus: 200 problems, 25 %, about 30 s left");
  EXPECT_EQ(Progress::line("oracle", 1, 4, 3600), "annulus: oracle, 25 %, about 3.0 h left");
  EXPECT_EQ(Progress::line("oracle", 1, 2, 600), "annulus: oracle, 50 %, about 10 min left");
  EXPECT_EQ(Progress::line("oracle", 4, 4, 600), "annulus: oracle, 100 %");
}

TEST(Progress, NothingIsEstimatedTooEarly) {
  EXPECT_EQ(Progress::line("oracle", 1, 2, 0.5), "annulus: oracle, 50 %");
  EXPECT_EQ(Progress::line("oracle", 0.001, 2, 100), "annulus: oracle, 0 %");
  EXPECT_EQ(Progress::line("reading files", 0, 0, 12), "annulus: reading files, 12 s so far");
}

// A terminal whose other end the test reads.
class Terminal {
 public:
  Terminal() : master_(::posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK)) {
    if (::grantpt(master_.get()) != 0 || ::unlockpt(master_.get()) != 0) std::abort();
  }
  [[nodiscard]] files::FileDescriptor open() const {
    return files::FileDescriptor(::open(::ptsname(master_.get()), O_WRONLY | O_NOCTTY));
  }
  [[nodiscard]] std::string text() const {
    std::string text(1 << 16, '\0');
    const ssize_t got = ::read(master_.get(), text.data(), text.size());
    text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return text;
  }

 private:
  files::FileDescriptor master_;
};

void wait_a_moment() {
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
}

TEST(Progress, ALineIsRewrittenAndWipedOut) {
  const Terminal terminal;
  {
    Progress progress(terminal.open());
    progress.begin("200 problems", 200);
    progress.advance(20);
    wait_a_moment();
    const std::string early = terminal.text();
    EXPECT_THAT(early, HasSubstr("\rannulus: 200 problems, 10 %\33[K\r"));
    EXPECT_EQ(early.find('\n'), std::string::npos);
    progress.aside([&] { EXPECT_THAT(terminal.text(), EndsWith("\r\33[K")); });
    progress.set_done(100);
    progress.go_on("problem 101 of 200");
    wait_a_moment();
    EXPECT_THAT(terminal.text(), HasSubstr("\rannulus: problem 101 of 200, 50 %, about 3 s left"));
  }
  EXPECT_THAT(terminal.text(), EndsWith("\r\33[K"));
}

TEST(Progress, ShortWorkShowsNothing) {
  const Terminal terminal;
  {
    Progress progress(terminal.open());
    progress.begin("200 problems", 200);
  }
  EXPECT_THAT(terminal.text(), IsEmpty());
}

TEST(Progress, WithoutATerminalNothingHappens) {
  Progress progress;
  progress.begin("200 problems", 200);
  progress.advance(1);
  bool ran = false;
  progress.aside([&] { ran = true; });
  EXPECT_TRUE(ran);
}

TEST(Progress, APipeIsNoTerminal) {
  int ends[2] = {-1, -1};
  ASSERT_EQ(::pipe(ends), 0);
  const files::FileDescriptor reading(ends[0]);
  const files::FileDescriptor writing(ends[1]);
  const files::FileDescriptor before(::dup(STDERR_FILENO));
  ASSERT_GE(::dup2(writing.get(), STDERR_FILENO), 0);
  const bool found = static_cast<bool>(progress_terminal());
  ASSERT_GE(::dup2(before.get(), STDERR_FILENO), 0);
  EXPECT_FALSE(found);
}

}  // namespace
}  // namespace annulus::launcher
