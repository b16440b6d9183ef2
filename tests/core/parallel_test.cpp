#include <atomic>
#include <stdexcept>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/parallel.hpp>

namespace annulus {
namespace {

TEST(Parallel, RunsEveryTaskOnce) {
  for (const int workers : {1, 2, 5}) {
    std::vector<std::atomic<int>> runs(100);
    std::atomic<bool> known_worker = true;
    const std::thread::id caller = std::this_thread::get_id();
    parallel_for(100, workers, [&](std::int64_t task, int worker) {
      ++runs[static_cast<std::size_t>(task)];
      const bool right = worker >= 0 && worker < workers &&
                         (worker == 0) == (std::this_thread::get_id() == caller);
      if (!right) known_worker = false;
    });
    for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
    EXPECT_TRUE(known_worker);
  }
}

TEST(Parallel, OneInsideAnotherAgainAndAgain) {
  std::atomic<int> runs = 0;
  for (int round = 0; round < 20; ++round) {
    parallel_for(6, 1 + round % 4, [&](std::int64_t /*task*/, int /*worker*/) {
      parallel_for(5, 3, [&](std::int64_t /*task*/, int /*worker*/) { ++runs; });
    });
  }
  EXPECT_EQ(runs, 20 * 6 * 5);
}

TEST(Parallel, NothingToDo) {
  parallel_for(0, 3, [](std::int64_t /*task*/, int /*worker*/) { FAIL(); });
}

TEST(Parallel, ThrowsWhatATaskThrew) {
  for (const int workers : {1, 4}) {
    EXPECT_THROW(parallel_for(50, workers,
                              [](std::int64_t task, int /*worker*/) {
                                if (task == 7) throw std::runtime_error("seven");
                              }),
                 std::runtime_error);
  }
}

TEST(Parallel, TheCallerWaitsInItsOwnWay) {
  int waits = 0;
  parallel_for(
      4, 2, [](std::int64_t /*task*/, int /*worker*/) {}, [&] { ++waits; });
  EXPECT_GE(waits, 1);
}

// The threads that a call leaves behind are not there in the child of a fork.
TEST(Parallel, WorksInTheChildOfAFork) {
  const auto count = [] {
    std::atomic<int> done = 0;
    parallel_for(8, 3, [&](std::int64_t, int) { ++done; });
    return done.load();
  };
  ASSERT_EQ(count(), 8);
  const pid_t child = fork();
  ASSERT_NE(child, -1);
  if (child == 0) {
    alarm(20);  // rather than wait for ever
    _exit(count() == 8 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace annulus
