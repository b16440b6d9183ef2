#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/trace.hpp>

#include "launcher/report/trace_file.hpp"
#include "tests/mesh/world_group.hpp"

namespace annulus::launcher {
namespace {

TEST(ClockOffset, LiesWithinWhatEveryBarrierAllows) {
  std::mt19937 random(3);
  const auto delay = [&] { return static_cast<std::int64_t>(random() % 10'000); };
  for (const std::int64_t offset :
       {std::int64_t{0}, std::int64_t{-5'000'000'000}, std::int64_t{123'456'789'012'345}}) {
    ClockSamples here;
    ClockSamples there;
    std::int64_t now = 1'000'000'000;
    for (int round = 0; round < 20; ++round) {
      // Both enter, then both leave, each in its own time.
      here.before.push_back(now + delay());
      there.before.push_back(now + delay() + offset);
      now += 10'000;
      here.after.push_back(now + delay());
      there.after.push_back(now + delay() + offset);
      now += 20'000;
    }
    // Twenty rounds leave less room than one, which allows twice 20 µs.
    EXPECT_LT(std::llabs(clock_offset(there, here) - offset), 10'000);
    EXPECT_LT(std::llabs(clock_offset(here, there) + offset), 10'000);
  }
}

TEST(ClockOffset, NothingIsKnownWithoutSamples) {
  EXPECT_EQ(clock_offset({}, {}), 0);
}

TEST(ClockOffset, OfTheRanksOfAJob) {
  const auto group = test::make_world_group();
  constexpr std::int64_t kApart = 3'600'000'000'000;
  const ClockSamples own =
      sample_clock(group->control(), 20, [&] { return monotonic_ns() + group->rank() * kApart; });
  ASSERT_EQ(own.before.size(), 20U);
  // Ranks of one machine share a clock, so what was added must be found again.
  const auto text = [](const std::vector<std::int64_t>& times) {
    return std::string(reinterpret_cast<const char*>(times.data()),
                       times.size() * sizeof(times[0]));
  };
  const auto times = [](const std::string& bytes) {
    std::vector<std::int64_t> result(bytes.size() / sizeof(std::int64_t));
    std::memcpy(result.data(), bytes.data(), bytes.size());
    return result;
  };
  const auto before = group->control().gather_text(text(own.before));
  const auto after = group->control().gather_text(text(own.after));
  const ClockSamples first{times(before[0]), times(after[0])};
  for (int rank = 1; rank < group->size(); ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    const std::int64_t found = clock_offset({times(before[r]), times(after[r])}, first);
    EXPECT_LT(std::llabs(found - rank * kApart), 50'000'000) << rank;
  }
}

}  // namespace
}  // namespace annulus::launcher
