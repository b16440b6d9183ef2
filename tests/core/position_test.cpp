#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/position.hpp>

namespace annulus {
namespace {

static_assert(!std::is_convertible_v<GlobalPosition, LocalPosition>);
static_assert(!std::is_constructible_v<GlobalPosition, LocalPosition>);
static_assert(!std::is_convertible_v<GlobalPosition, std::int64_t>);
static_assert(!std::is_convertible_v<std::int64_t, GlobalPosition>);

std::vector<std::int64_t> listed(const PositionRanges& ranges) {
  std::vector<std::int64_t> positions;
  for (const PositionRange& range : ranges.ranges()) {
    for (std::int64_t i = 0; i < range.length; ++i) {
      positions.push_back(range.start.value() + i * range.stride);
    }
  }
  return positions;
}

PositionRange range(std::int64_t start, std::int64_t length, std::int64_t stride = 1) {
  return {GlobalPosition(start), length, stride};
}

// Up to three ranges, in no particular order, that share no positions.
PositionRanges random_ranges(std::mt19937& random) {
  std::vector<PositionRange> ranges;
  std::set<std::int64_t> taken;
  for (int attempt = 0; attempt < 3; ++attempt) {
    const PositionRange candidate = range(random() % 40, random() % 12, 1 + random() % 6);
    std::vector<std::int64_t> positions = listed(PositionRanges({candidate}));
    if (std::any_of(positions.begin(), positions.end(),
                    [&](std::int64_t p) { return taken.contains(p); })) {
      continue;
    }
    taken.insert(positions.begin(), positions.end());
    ranges.push_back(candidate);
  }
  return PositionRanges(ranges);
}

TEST(PositionRange, CountsEntriesBelowABound) {
  for (std::int64_t stride = 1; stride <= 5; ++stride) {
    const PositionRange r = range(7, 6, stride);
    for (std::int64_t bound = 0; bound < 45; ++bound) {
      std::int64_t expected = 0;
      for (std::int64_t i = 0; i < r.length; ++i) expected += r.at(i).value() < bound ? 1 : 0;
      EXPECT_EQ(r.count_below(GlobalPosition(bound)), expected) << stride << " " << bound;
    }
  }
}

TEST(PositionRange, FindsTheEntriesWithinAnInterval) {
  const PositionRange r = range(3, 5, 4);  // 3 7 11 15 19
  for (std::int64_t low = 0; low < 24; ++low) {
    for (std::int64_t high = 0; high < 24; ++high) {
      std::vector<std::int64_t> expected;
      for (std::int64_t i = 0; i < r.length; ++i) {
        if (r.at(i).value() >= low && r.at(i).value() < high) expected.push_back(i);
      }
      const LocalRange found = r.indices_within(GlobalPosition(low), GlobalPosition(high));
      ASSERT_EQ(found.count, static_cast<std::int64_t>(expected.size())) << low << " " << high;
      if (!expected.empty()) {
        EXPECT_EQ(found.begin.value(), expected.front());
      }
    }
  }
}

TEST(PositionRanges, ConvertsBothWays) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    const PositionRanges ranges = random_ranges(random);
    const std::vector<std::int64_t> positions = listed(ranges);
    ASSERT_EQ(ranges.size(), static_cast<std::int64_t>(positions.size()));
    ASSERT_EQ(ranges.empty(), positions.empty());
    std::map<std::int64_t, std::int64_t> local_of;
    for (std::size_t i = 0; i < positions.size(); ++i) {
      local_of[positions[i]] = static_cast<std::int64_t>(i);
      EXPECT_EQ(ranges.global(LocalPosition(static_cast<std::int64_t>(i))).value(), positions[i]);
    }
    for (std::int64_t p = -3; p < 110; ++p) {
      const auto local = ranges.local(GlobalPosition(p));
      ASSERT_EQ(local.has_value(), local_of.contains(p)) << to_string(ranges) << " at " << p;
      if (local) {
        EXPECT_EQ(local->value(), local_of[p]);
      }
    }
    EXPECT_THROW((void)ranges.global(LocalPosition(ranges.size())), InternalError);
    EXPECT_THROW((void)ranges.global(LocalPosition(-1)), InternalError);
  }
}

TEST(PositionRanges, SlicesRunsOfLocalPositions) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 100; ++trial) {
    const PositionRanges ranges = random_ranges(random);
    const std::vector<std::int64_t> positions = listed(ranges);
    for (std::int64_t begin = 0; begin <= ranges.size(); ++begin) {
      for (std::int64_t count = 0; begin + count <= ranges.size(); ++count) {
        const std::vector<std::int64_t> expected(positions.begin() + begin,
                                                 positions.begin() + begin + count);
        EXPECT_EQ(listed(ranges.slice({LocalPosition(begin), count})), expected);
      }
    }
  }
}

TEST(PositionRanges, IntersectsAndSaysWhereEachSideHasIt) {
  std::mt19937 random(3);
  int shared = 0;
  for (int trial = 0; trial < 500; ++trial) {
    const PositionRanges first = random_ranges(random);
    const PositionRanges second = random_ranges(random);
    std::set<std::int64_t> expected;
    for (const std::int64_t p : listed(first)) {
      if (second.local(GlobalPosition(p))) expected.insert(p);
    }
    std::set<std::int64_t> found;
    for (const CommonRange& common : intersect(first, second)) {
      ASSERT_GT(common.global.length, 0);
      for (std::int64_t i = 0; i < common.global.length; ++i) {
        const GlobalPosition p = common.global.at(i);
        EXPECT_TRUE(found.insert(p.value()).second) << "twice: " << p.value();
        EXPECT_EQ(first.global(common.first + i * common.first_step), p);
        EXPECT_EQ(second.global(common.second + i * common.second_step), p);
      }
    }
    EXPECT_EQ(found, expected) << to_string(first) << " and " << to_string(second);
    shared += static_cast<int>(found.size());
  }
  EXPECT_GT(shared, 1000);  // the trials were not all empty
}

TEST(PositionRanges, PrintsShortly) {
  EXPECT_EQ(to_string(PositionRanges()), "-");
  EXPECT_EQ(to_string(PositionRanges::all(0)), "-");
  EXPECT_EQ(to_string(PositionRanges::all(16)), "0:16");
  EXPECT_EQ(to_string(PositionRanges({range(3, 4, 4)})), "3:16:4");
  EXPECT_EQ(to_string(PositionRanges({range(0, 2), range(6, 2)})), "0:2+6:8");
}

TEST(PositionRanges, DropsEmptyRanges) {
  EXPECT_EQ(PositionRanges({range(5, 0), range(1, 2)}), PositionRanges({range(1, 2)}));
}

}  // namespace
}  // namespace annulus
