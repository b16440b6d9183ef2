#include <cstdint>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/partition/sequence_layout.hpp>

namespace annulus {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

PositionRanges ranges(std::vector<std::pair<std::int64_t, std::int64_t>> begins_and_ends) {
  std::vector<PositionRange> result;
  for (const auto& [begin, end] : begins_and_ends) {
    result.push_back({GlobalPosition(begin), end - begin, 1});
  }
  return PositionRanges(std::move(result));
}

// 12 positions on three ranks, the last of which holds nothing.
Assignment example() {
  return Assignment({ranges({{0, 2}, {5, 9}}), ranges({{2, 5}, {9, 12}}), PositionRanges()});
}

TEST(Assignment, IsABijection) {
  const Assignment assignment = example();
  EXPECT_EQ(assignment.length(), 12);
  EXPECT_EQ(assignment.ranks(), 3);
  std::int64_t held = 0;
  for (int rank = 0; rank < assignment.ranks(); ++rank) {
    const PositionRanges& positions = assignment.positions(rank);
    held += positions.size();
    for (std::int64_t i = 0; i < positions.size(); ++i) {
      EXPECT_EQ(assignment.owner(positions.global(LocalPosition(i))), rank);
    }
  }
  EXPECT_EQ(held, assignment.length());
}

TEST(Assignment, OfNothing) {
  const Assignment assignment({PositionRanges(), PositionRanges()});
  EXPECT_EQ(assignment.length(), 0);
  EXPECT_EQ(assignment.ranks(), 2);
}

TEST(Assignment, IsEqualByWhatItGives) {
  EXPECT_EQ(example(), example());
  EXPECT_EQ(example().digest(), example().digest());
  const Assignment swapped({ranges({{2, 5}, {9, 12}}), ranges({{0, 2}, {5, 9}}), PositionRanges()});
  EXPECT_FALSE(example() == swapped);
  EXPECT_NE(example().digest(), swapped.digest());
  // The same positions on fewer ranks.
  const Assignment fewer({ranges({{0, 2}, {5, 9}}), ranges({{2, 5}, {9, 12}})});
  EXPECT_FALSE(example() == fewer);
  EXPECT_NE(example().digest(), fewer.digest());
}

TEST(Assignment, RefusesWhatIsNone) {
  const auto refused = [](std::vector<PositionRanges> by_rank, const char* why) {
    EXPECT_THAT([&] { const Assignment assignment(by_rank); },
                ThrowsMessage<ArgumentError>(HasSubstr(why)));
  };
  refused({}, "assignment: got no ranks");
  refused({ranges({{0, 4}}), ranges({{5, 8}})}, "position 4 with no rank");
  refused({ranges({{1, 4}})}, "position 0 with no rank");
  refused({ranges({{0, 4}}), ranges({{3, 8}})}, "position 3 twice");
  refused({ranges({{4, 8}, {0, 4}})}, "4:8+0:4 for rank 0");
  refused({PositionRanges({{GlobalPosition(0), 4, 2}})}, "0:7:2 for rank 0");
}

TEST(Assignment, MakesABalancedLayout) {
  const SequenceLayout layout(example());
  EXPECT_EQ(layout.kind(), LayoutKind::balanced);
  EXPECT_EQ(layout.length(), 12);
  EXPECT_EQ(layout.ranks(), 3);
  EXPECT_EQ(to_string(layout.positions(1)), "2:5+9:12");
  EXPECT_EQ(layout.owner(GlobalPosition(8)), 0);
  EXPECT_THROW((void)layout.owner(GlobalPosition(12)), InternalError);
  EXPECT_THROW((void)layout.positions(3), InternalError);
  EXPECT_THAT([] { const SequenceLayout none(LayoutKind::balanced, 12, 3); },
              ThrowsMessage<ArgumentError>(HasSubstr("an assignment, which says who holds what")));
}

TEST(Assignment, MakesADistribution) {
  const Distribution assigned = Distribution::assigned(example());
  EXPECT_EQ(assigned.layout(), LayoutKind::balanced);
  EXPECT_EQ(assigned.copies(12, 3), 1);
  EXPECT_TRUE(assigned.fits(12, 3));
  EXPECT_FALSE(assigned.fits(12, 2));
  EXPECT_FALSE(assigned.fits(24, 3));
  EXPECT_EQ(assigned.positions(12, 3, 0), example().positions(0));
  EXPECT_EQ(to_string(assigned), "balanced:" + example().digest().substr(0, 8));
  EXPECT_EQ(assigned, Distribution::assigned(example()));
  EXPECT_EQ(Distribution().assignment(), nullptr);
  EXPECT_THAT([] { (void)Distribution::sequence(LayoutKind::balanced); },
              ThrowsMessage<ArgumentError>(HasSubstr("an assignment, which says who holds what")));
}

TEST(Assignment, MustFitItsSharding) {
  const MeshShape mesh({{"sp", 3}, {"tp", 2}});
  const std::vector<Distribution> assigned{Distribution::block(),
                                           Distribution::assigned(example())};
  const NamedSharding sharding(mesh, PartitionSpec::parse("-,sp"), {1, 12}, assigned);
  EXPECT_EQ(sharding.local_shape(0), (Extents{1, 6}));
  EXPECT_EQ(sharding.local_shape(5), (Extents{1, 0}));
  EXPECT_EQ(to_string(sharding.positions(2, 1)), "2:5+9:12");
  EXPECT_TRUE(sharding.is_primary(0));
  EXPECT_FALSE(sharding.is_primary(1));
  const auto refused = [&](const char* spec, const Extents& shape, const char* why) {
    EXPECT_THAT([&] { const NamedSharding bad(mesh, PartitionSpec::parse(spec), shape, assigned); },
                ThrowsMessage<ArgumentError>(HasSubstr(why)));
  };
  const char* const got = "assignment of dimension 1: got 12 positions on 3 ranks";
  refused("-,sp", {1, 24}, got);
  refused("-,tp", {1, 12}, got);
  refused("sp", {3, 12}, got);  // 12 positions on one rank
}

}  // namespace
}  // namespace annulus
