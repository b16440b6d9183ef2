#include <map>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/named_sharding.hpp>

#include "random_sharding.hpp"

namespace annulus {
namespace {

using test::linear;
using test::Random;

TEST(NamedSharding, CutsAnExampleByHand) {
  // Ranks 0..5 are (dp, sp) = (0,0) (0,1) (0,2) (1,0) (1,1) (1,2).
  const MeshShape mesh({{"dp", 2}, {"sp", 3}});
  const NamedSharding sharding(mesh, PartitionSpec::parse("dp,sp"), {4, 7, 5},
                               {Distribution::block(), Distribution::sequence()});
  EXPECT_EQ(sharding.local_shape(0), (Extents{2, 3, 5}));
  EXPECT_EQ(sharding.local_shape(4), (Extents{2, 2, 5}));
  EXPECT_EQ(to_string(sharding.positions(4, 0)), "2:4");
  EXPECT_EQ(to_string(sharding.positions(4, 1)), "3:5");
  EXPECT_EQ(to_string(sharding.positions(4, 2)), "0:5");
  EXPECT_EQ(sharding.shards(1), 3);
  EXPECT_EQ(sharding.shards(2), 1);
  EXPECT_EQ(sharding.coordinate(5, 1), 2);
  EXPECT_EQ(to_string(sharding), "[4, 7, 5] on dp=2,sp=3 as dp,sp(contiguous),-");
}

TEST(NamedSharding, FirstAxisOfATupleIsMajor) {
  const MeshShape mesh({{"a", 2}, {"b", 3}});
  const NamedSharding sharding(mesh, PartitionSpec::parse("b+a"), {6});
  // Rank 4 is a=1, b=1: position b·2 + a = 3.
  EXPECT_EQ(to_string(sharding.positions(4, 0)), "3:4");
}

TEST(NamedSharding, HoldsEverythingAndOnePrimaryWritesIt) {
  Random random(11);
  int replicated = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const MeshShape mesh = test::random_mesh(random, test::draw(random, 1, 12));
    const NamedSharding sharding = test::random_shardings(random, mesh).first;
    SCOPED_TRACE(to_string(sharding));
    const auto elements = static_cast<std::size_t>(sharding.global_shape().product());
    std::vector<int> holders(elements);
    std::vector<int> writers(elements);
    std::map<std::vector<std::string>, int> primaries;  // shard → ranks that are its primary
    for (int rank = 0; rank < mesh.ranks(); ++rank) {
      std::int64_t held = 0;
      const bool primary = sharding.is_primary(rank);
      test::for_each_entry(sharding.index(rank), [&](const auto&, const auto& global) {
        const auto i = static_cast<std::size_t>(linear(sharding.global_shape(), global));
        ++holders[i];
        writers[i] += primary ? 1 : 0;
        ++held;
      });
      EXPECT_EQ(held, sharding.local_shape(rank).product());
      if (held == 0) continue;
      std::vector<std::string> shard;
      for (const PositionRanges& positions : sharding.index(rank)) {
        shard.push_back(to_string(positions));
      }
      primaries[shard] += primary ? 1 : 0;
    }
    for (std::size_t i = 0; i < elements; ++i) {
      ASSERT_GE(holders[i], 1);
      ASSERT_EQ(writers[i], 1);
      replicated += holders[i] > 1 ? 1 : 0;
    }
    for (const auto& [shard, count] : primaries) EXPECT_EQ(count, 1);
  }
  EXPECT_GT(replicated, 1000);  // the trials did replicate
}

TEST(NamedSharding, SharesKvHeads) {
  const MeshShape mesh({{"tp", 8}});
  const NamedSharding sharding(mesh, PartitionSpec::parse("-,-,tp,-"), {1, 4, 2, 16},
                               {{}, {}, Distribution::kv_heads()});
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(sharding.local_shape(rank), (Extents{1, 4, 1, 16}));
    EXPECT_EQ(sharding.positions(rank, 2).global(LocalPosition(0)).value(), rank / 4);
    EXPECT_EQ(sharding.is_primary(rank), rank % 4 == 0);
  }
}

TEST(NamedSharding, MoreRanksThanPositions) {
  const NamedSharding sharding(MeshShape({{"sp", 4}}), PartitionSpec::parse("sp"), {2},
                               {Distribution::sequence()});
  EXPECT_EQ(sharding.local_shape(1), (Extents{1}));
  EXPECT_EQ(sharding.local_shape(3), (Extents{0}));
}

TEST(NamedSharding, IsStrict) {
  const MeshShape mesh({{"dp", 2}, {"sp", 3}});
  EXPECT_THROW(NamedSharding(mesh, PartitionSpec::parse("sp"), {4}), IndivisibleError);
  EXPECT_THROW(NamedSharding(mesh, PartitionSpec::parse("tp"), {4}), UnknownAxisError);
  EXPECT_THROW(NamedSharding(mesh, PartitionSpec::parse("dp,sp"), {4}), SpecRankError);
  EXPECT_THROW(NamedSharding(mesh, PartitionSpec(), {4, -1}), ArgumentError);
  EXPECT_THROW(NamedSharding(mesh, PartitionSpec(), {4}, {{}, {}}), ArgumentError);
}

TEST(NamedSharding, ComparesPlacements) {
  const MeshShape mesh({{"dp", 2}, {"sp", 2}});
  const auto place = [&](const char* spec, Distribution distribution = {}) {
    return NamedSharding(mesh, PartitionSpec::parse(spec), {4, 4}, {distribution});
  };
  EXPECT_TRUE(same_placement(place("dp"), place("dp,-")));
  EXPECT_TRUE(same_placement(place("dp"), place("dp", Distribution::sequence())));
  EXPECT_FALSE(same_placement(place("dp"), place("sp")));
  EXPECT_FALSE(same_placement(place("dp"), place("-,dp")));
  EXPECT_FALSE(
      same_placement(place("dp"), place("dp", Distribution::sequence(LayoutKind::striped))));
  EXPECT_FALSE(same_placement(place("dp+sp"), place("sp+dp")));
}

}  // namespace
}  // namespace annulus
