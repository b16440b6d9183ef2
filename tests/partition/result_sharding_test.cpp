#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/shard_map.hpp>

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const MeshShape kMesh({{"dp", 2}, {"sp", 2}});

NamedSharding result(const ShardSpec& spec, const std::vector<Extents>& shapes) {
  return result_sharding(kMesh, spec, shapes, 3);
}

TEST(ResultSharding, SumsShardsAlongTheirAxes) {
  const std::vector<Extents> same(4, Extents{2, 3});
  EXPECT_EQ(result(PartitionSpec(), same).global_shape(), (Extents{2, 3}));
  EXPECT_EQ(result(PartitionSpec::parse("dp"), same).global_shape(), (Extents{4, 3}));
  EXPECT_EQ(result(PartitionSpec::parse("sp,dp"), same).global_shape(), (Extents{4, 6}));
  EXPECT_EQ(result(PartitionSpec::parse("-,sp+dp"), same).global_shape(), (Extents{2, 12}));
}

TEST(ResultSharding, SequencesMayBeUneven) {
  const std::vector<Extents> shapes{{2, 3}, {2, 2}, {2, 3}, {2, 2}};
  const ShardSpec spec(PartitionSpec::parse("dp,sp"),
                       {Distribution::block(), Distribution::sequence()});
  EXPECT_EQ(result(spec, shapes).global_shape(), (Extents{4, 5}));
  EXPECT_THROW((void)result(PartitionSpec::parse("dp,sp"), shapes), IndivisibleError);
}

TEST(ResultSharding, ShardsMustFormAWhole) {
  const ShardSpec sequence(PartitionSpec::parse("sp"), {Distribution::sequence()});
  EXPECT_THAT(
      [&] {
        (void)result(sequence, {{2}, {3}, {2}, {3}});
      },
      ThrowsMessage<ArgumentError>(AllOf(HasSubstr("result 3: got shape [2] on rank 0"),
                                         HasSubstr("expected [3], its part of [5]"))));
  EXPECT_THAT(
      [&] {
        (void)result(PartitionSpec::parse("sp"), {{2}, {2}, {2}, {1}});
      },
      ThrowsMessage<ArgumentError>(HasSubstr("got shape [1] on rank 3")));
  EXPECT_THAT(
      [&] {
        (void)result(PartitionSpec(), {{2}, {2}, {2, 1}, {2}});
      },
      ThrowsMessage<ArgumentError>(HasSubstr("shape [2, 1] on rank 2")));
}

TEST(ResultSharding, SpecsMustFit) {
  const std::vector<Extents> same(4, Extents{2});
  EXPECT_THROW((void)result(PartitionSpec::parse("dp,sp"), same), SpecRankError);
  EXPECT_THROW((void)result(PartitionSpec::parse("tp"), same), UnknownAxisError);
  EXPECT_THROW((void)result({PartitionSpec::parse("sp"), {Distribution::kv_heads()}}, same),
               ArgumentError);
}

}  // namespace
}  // namespace annulus
