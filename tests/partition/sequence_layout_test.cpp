#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/sequence_layout.hpp>

namespace annulus {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

using Positions = std::vector<std::int64_t>;

Positions listed(const PositionRanges& ranges) {
  Positions positions;
  for (std::int64_t i = 0; i < ranges.size(); ++i) {
    positions.push_back(ranges.global(LocalPosition(i)).value());
  }
  return positions;
}

// The definition, one position at a time.
std::vector<Positions> brute_force(LayoutKind kind, std::int64_t length, int ranks,
                                   std::int64_t granule) {
  std::vector<Positions> held(static_cast<std::size_t>(ranks));
  if (kind == LayoutKind::striped) {
    for (std::int64_t p = 0; p < length; ++p)
      held[static_cast<std::size_t>(p % ranks)].push_back(p);
    return held;
  }
  const std::size_t count = static_cast<std::size_t>(ranks) * (kind == LayoutKind::zigzag ? 2 : 1);
  std::vector<std::int64_t> sizes(count);
  for (std::int64_t i = 0; i < length / granule; ++i) {
    sizes[static_cast<std::size_t>(i) % count] += granule;
  }
  sizes.back() += length % granule;
  std::vector<Positions> chunks;
  std::int64_t next = 0;
  for (const std::int64_t size : sizes) {
    Positions& chunk = chunks.emplace_back(static_cast<std::size_t>(size));
    std::iota(chunk.begin(), chunk.end(), next);
    next += size;
  }
  for (std::size_t r = 0; r < held.size(); ++r) {
    held[r] = chunks[r];
    if (kind == LayoutKind::zigzag) {
      const Positions& mirror = chunks[count - 1 - r];
      held[r].insert(held[r].end(), mirror.begin(), mirror.end());
    }
  }
  return held;
}

// The `granules` that a layout can have.
std::vector<std::int64_t> granules_of(LayoutKind kind, std::vector<std::int64_t> granules) {
  return kind == LayoutKind::striped ? std::vector<std::int64_t>{1} : granules;
}

class SequenceLayoutTest : public ::testing::TestWithParam<LayoutKind> {};

TEST_P(SequenceLayoutTest, IsTheBijectionOfTheDefinition) {
  for (const std::int64_t granule : granules_of(GetParam(), {1, 2, 3, 5, 8})) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (std::int64_t length = 0; length <= 40; ++length) {
        SCOPED_TRACE("length " + std::to_string(length) + " on " + std::to_string(ranks) + " by " +
                     std::to_string(granule));
        const SequenceLayout layout(GetParam(), length, ranks, granule);
        const auto expected = brute_force(GetParam(), length, ranks, granule);
        std::int64_t held = 0;
        for (int r = 0; r < ranks; ++r) {
          const PositionRanges positions = layout.positions(r);
          ASSERT_EQ(listed(positions), expected[static_cast<std::size_t>(r)]);
          held += positions.size();
          EXPECT_LE(positions.ranges().size(), GetParam() == LayoutKind::zigzag ? 2U : 1U);
          for (const std::int64_t p : expected[static_cast<std::size_t>(r)]) {
            ASSERT_EQ(layout.owner(GlobalPosition(p)), r) << "position " << p;
          }
        }
        EXPECT_EQ(held, length);
      }
    }
  }
}

TEST_P(SequenceLayoutTest, RangesDifferByAtMostOneGranule) {
  for (const std::int64_t granule : granules_of(GetParam(), {1, 3, 4})) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (std::int64_t length = 0; length <= 40; ++length) {
        const SequenceLayout layout(GetParam(), length, ranks, granule);
        std::int64_t low = length;
        std::int64_t high = 0;
        for (int r = 0; r < ranks; ++r) {
          std::size_t chunks = GetParam() == LayoutKind::zigzag ? 2 : 1;
          for (const PositionRange& range : layout.positions(r).ranges()) {
            low = std::min(low, range.length);
            high = std::max(high, range.length);
            --chunks;
          }
          if (chunks > 0) low = 0;  // an empty chunk has no range
        }
        EXPECT_LE(high - low, granule) << length << " on " << ranks << " by " << granule;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, SequenceLayoutTest,
                         ::testing::Values(LayoutKind::contiguous, LayoutKind::zigzag,
                                           LayoutKind::striped),
                         [](const auto& kind) { return std::string(name_of(kind.param)); });

TEST(SequenceLayout, AssignsTheExamplesOfItsDocumentation) {
  std::vector<std::int64_t> sizes;
  for (int r = 0; r < 4; ++r) {
    sizes.push_back(SequenceLayout(LayoutKind::contiguous, 10, 4).positions(r).size());
  }
  EXPECT_THAT(sizes, ElementsAre(3, 3, 2, 2));
  EXPECT_THAT(listed(SequenceLayout(LayoutKind::zigzag, 8, 2).positions(1)),
              ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(listed(SequenceLayout(LayoutKind::striped, 8, 3).positions(1)), ElementsAre(1, 4, 7));
}

TEST(SequenceLayout, RaggedRemainderGoesToTheLastChunk) {
  // 11 = 2 granules of 4, and 3 left.
  const SequenceLayout contiguous(LayoutKind::contiguous, 11, 3, 4);
  EXPECT_EQ(to_string(contiguous.positions(0)), "0:4");
  EXPECT_EQ(to_string(contiguous.positions(1)), "4:8");
  EXPECT_EQ(to_string(contiguous.positions(2)), "8:11");
  const SequenceLayout zigzag(LayoutKind::zigzag, 11, 2, 4);
  EXPECT_EQ(to_string(zigzag.positions(0)), "0:4+8:11");
  EXPECT_EQ(to_string(zigzag.positions(1)), "4:8");
}

TEST(SequenceLayout, StripedRefusesAGranule) {
  EXPECT_THAT([] { static_cast<void>(SequenceLayout(LayoutKind::striped, 8, 2, 4)); },
              ThrowsMessage<ArgumentError>(HasSubstr(
                  "sequence granule: got 4, expected 1 or none with the layout striped")));
  EXPECT_NO_THROW(static_cast<void>(SequenceLayout(LayoutKind::striped, 8, 2, 1)));
}

TEST(SequenceLayout, ShorterThanTheRanks) {
  const SequenceLayout layout(LayoutKind::striped, 2, 4);
  EXPECT_THAT(listed(layout.positions(1)), ElementsAre(1));
  EXPECT_THAT(listed(layout.positions(3)), IsEmpty());
}

TEST(SequenceLayout, HoldsLongSequences) {
  const std::int64_t length = (std::int64_t{1} << 40) + 1;
  const SequenceLayout layout(LayoutKind::zigzag, length, 1000, 128);
  EXPECT_EQ(layout.owner(GlobalPosition(length - 1)), 0);
  EXPECT_EQ(layout.positions(0).ranges().back().last(), GlobalPosition(length - 1));
}

TEST(SequenceLayout, RefusesWhatItCannotAssign) {
  EXPECT_THROW(SequenceLayout(LayoutKind::zigzag, -1, 2), ArgumentError);
  EXPECT_THROW(SequenceLayout(LayoutKind::zigzag, 4, 0), ArgumentError);
  EXPECT_THROW(SequenceLayout(LayoutKind::zigzag, 4, 2, 0), ArgumentError);
  const SequenceLayout layout(LayoutKind::zigzag, 4, 2);
  EXPECT_THROW((void)layout.owner(GlobalPosition(4)), InternalError);
  EXPECT_THROW((void)layout.positions(2), InternalError);
}

TEST(SequenceLayout, HasNames) {
  for (const LayoutKind kind :
       {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped, LayoutKind::balanced}) {
    EXPECT_EQ(parse_layout(name_of(kind)), kind);
  }
  EXPECT_THAT([] { (void)parse_layout("Zigzag"); },
              ThrowsMessage<ArgumentError>(HasSubstr("sequence layout: got 'Zigzag'")));
}

}  // namespace
}  // namespace annulus
