#include "simulation/event_queue.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <utility>

#include <gtest/gtest.h>

namespace annulus::ring::simulation {
namespace {

// A message whose speed changes a thousand times has one event, the last that was set.
TEST(EventQueue, AMessageHasOneEventHoweverOftenItsSpeedChanges) {
  EventQueue queue;
  queue.set({5, 1, What::flow_ends});
  for (int change = 1000; change > 0; --change) {
    queue.set({static_cast<double>(change % 7), 0, What::flow_ends});
    ASSERT_EQ(queue.size(), 2U);
  }
  queue.set({9, 0, What::flow_ends});
  EXPECT_EQ(queue.top().id, 1U);
  queue.pop();
  EXPECT_EQ(queue.top().time, 9);
  queue.pop();
  EXPECT_TRUE(queue.empty());
}

TEST(EventQueue, RanksAndMessagesOfOneNumberAreDistinct) {
  EventQueue queue;
  queue.set({2, 3, What::flow_starts});
  queue.set({2, 3, What::step_ends});
  EXPECT_EQ(queue.size(), 2U);
  EXPECT_EQ(queue.top().what, What::step_ends);
}

// Against a sorted list, for events that come, move and go at random.
TEST(EventQueue, TheEarliestIsFirst) {
  std::mt19937 random(31);
  EventQueue queue;
  std::map<std::pair<bool, std::uint32_t>, Event> expected;  // by whether it is a rank's, and id
  for (int turn = 0; turn < 20000; ++turn) {
    if (random() % 3 != 0 || expected.empty()) {
      const bool rank = random() % 4 == 0;
      const Event event{static_cast<double>(random() % 50),
                        static_cast<std::uint32_t>(random() % 40),
                        rank ? What::step_ends : What::flow_ends};
      queue.set(event);
      expected.insert_or_assign({rank, event.id}, event);
    } else {
      const auto first =
          std::min_element(expected.begin(), expected.end(),
                           [](const auto& a, const auto& b) { return a.second < b.second; });
      ASSERT_EQ(queue.top().time, first->second.time) << turn;
      ASSERT_EQ(queue.top().id, first->second.id) << turn;
      ASSERT_EQ(queue.top().what, first->second.what) << turn;
      queue.pop();
      expected.erase(first);
    }
    ASSERT_EQ(queue.size(), expected.size());
  }
}

}  // namespace
}  // namespace annulus::ring::simulation
