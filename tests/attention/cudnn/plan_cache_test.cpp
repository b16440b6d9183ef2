// Tests of the cache of cuDNN's plans; no GPU needed.
#include "cudnn/plan_cache.hpp"

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

namespace annulus {
namespace {

using Cache = PlanCache<int, std::string>;

std::function<Cache::Pointer()> maker(const std::string& text, int& calls) {
  return [&calls, text] {
    ++calls;
    return std::make_shared<const std::string>(text);
  };
}

TEST(PlanCache, MakesEachPlanOnce) {
  Cache cache(4);
  int calls = 0;
  const Cache::Pointer one = cache.get(1, maker("one", calls));
  EXPECT_EQ(*one, "one");
  EXPECT_EQ(cache.get(1, maker("another", calls)), one);
  EXPECT_EQ(*cache.get(2, maker("two", calls)), "two");
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(cache.made(), 2U);
}

TEST(PlanCache, TheLeastRecentlyUsedLeaves) {
  Cache cache(2);
  int calls = 0;
  const Cache::Pointer held = cache.get(1, maker("one", calls));
  (void)cache.get(2, maker("two", calls));
  (void)cache.get(1, maker("one", calls));
  (void)cache.get(3, maker("three", calls));  // 2 leaves
  EXPECT_EQ(cache.size(), 2U);
  EXPECT_EQ(cache.get(1, maker("one", calls)), held);
  EXPECT_EQ(calls, 3);
  (void)cache.get(2, maker("two", calls));
  EXPECT_EQ(calls, 4);
  (void)cache.get(4, maker("four", calls));
  EXPECT_EQ(*held, "one") << "who holds one keeps it";
}

TEST(PlanCache, RefusalsAreKnownAndOtherErrorsForgotten) {
  Cache cache(4);
  int calls = 0;
  const auto refuse = [&]() -> Cache::Pointer {
    ++calls;
    throw UnsupportedError("no engine");
  };
  EXPECT_THROW((void)cache.get(1, refuse), UnsupportedError);
  EXPECT_THROW((void)cache.get(1, refuse), UnsupportedError);
  EXPECT_EQ(calls, 1);
  EXPECT_THROW((void)cache.get(2, []() -> Cache::Pointer { throw std::runtime_error("bad luck"); }),
               std::runtime_error);
  EXPECT_EQ(*cache.get(2, maker("two", calls)), "two");
}

TEST(PlanCache, ThreadsThatAskForTheSameWaitForOne) {
  Cache cache(4);
  std::atomic<int> calls = 0;
  std::atomic<int> at_once = 0;
  std::atomic<int> most = 0;
  std::vector<std::thread> threads;
  std::vector<Cache::Pointer> plans(8);
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      plans[static_cast<std::size_t>(i)] = cache.get(i % 2, [&] {
        ++calls;
        ++at_once;
        // Long enough for the other key's maker to start, unless it is wrongly held up.
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (most < 2 && std::chrono::steady_clock::now() < end) {
          most = std::max(most.load(), at_once.load());
          std::this_thread::yield();
        }
        return std::make_shared<const std::string>(std::to_string(i % 2));
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(most, 2) << "different keys are made at the same time";
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(plans[i], plans[i % 2]);
}

}  // namespace
}  // namespace annulus
