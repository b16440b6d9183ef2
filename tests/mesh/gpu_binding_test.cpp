#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/mesh/gpu_binding.hpp>

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

VisibleGpus sees(std::vector<std::string> identities) {
  return {std::move(identities), "", false};
}
VisibleGpus sees_none(std::string reason, bool broken = false) {
  return {{}, std::move(reason), broken};
}

Topology nodes(const std::vector<std::string>& names) {
  std::vector<std::string> seats;
  for (const std::string& name : names) seats.push_back(name + "\n" + name);
  return Topology::from_seats(seats);
}

TEST(GpuBinding, RanksThatSeeAllTakeOneEach) {
  const VisibleGpus all = sees({"A", "B", "C", "D"});
  const GpuBinding binding = bind_gpus(nodes({"x", "x", "x", "x"}), {all, all, all, all}, false);
  EXPECT_EQ(binding.obstacle, "");
  EXPECT_TRUE(binding.any);
  EXPECT_THAT(binding.device_of_rank, ElementsAre(0, 1, 2, 3));
}

TEST(GpuBinding, OneVisibleGpuPerRank) {
  // As srun --gpus-per-task=1 does it: device 0 of every rank is another one.
  const GpuBinding binding =
      bind_gpus(nodes({"x", "x", "x"}), {sees({"A"}), sees({"B"}), sees({"C"})}, false);
  EXPECT_EQ(binding.obstacle, "");
  EXPECT_THAT(binding.device_of_rank, ElementsAre(0, 0, 0));
}

TEST(GpuBinding, RanksMakeWayForThoseThatSeeLess) {
  const GpuBinding binding = bind_gpus(
      nodes({"x", "x", "x"}), {sees({"A", "B", "C"}), sees({"A"}), sees({"B", "A"})}, false);
  EXPECT_EQ(binding.obstacle, "");
  EXPECT_THAT(binding.device_of_rank, ElementsAre(2, 0, 0));
}

TEST(GpuBinding, EveryNodeHasItsOwn) {
  // The same identity on two nodes is two GPUs.
  const VisibleGpus both = sees({"A", "B"});
  const GpuBinding binding =
      bind_gpus(nodes({"x", "y", "x", "y"}), {both, both, both, both}, false);
  EXPECT_EQ(binding.obstacle, "");
  EXPECT_THAT(binding.device_of_rank, ElementsAre(0, 0, 1, 1));
}

TEST(GpuBinding, TooFewAreAnObstacleThatNamesTheRank) {
  const VisibleGpus both = sees({"A", "B"});
  const GpuBinding binding =
      bind_gpus(nodes({"y", "x", "x", "x"}), {both, both, both, both}, false);
  EXPECT_THAT(binding.device_of_rank, IsEmpty());
  EXPECT_TRUE(binding.any);
  EXPECT_EQ(binding.obstacle,
            "node x: rank 3 has no GPU of its own: 3 ranks on this node but 2 visible GPUs; start "
            "one rank per GPU or give --share-gpus");
}

TEST(GpuBinding, RanksThatWereGivenTheSameGpu) {
  const GpuBinding binding = bind_gpus(nodes({"x", "x"}), {sees({"A"}), sees({"A"})}, false);
  EXPECT_THAT(binding.obstacle,
              AllOf(HasSubstr("rank 1"), HasSubstr("2 ranks on this node but 1 visible GPU;")));
}

TEST(GpuBinding, SharingSpreadsTheRanks) {
  const VisibleGpus both = sees({"A", "B"});
  EXPECT_THAT(bind_gpus(nodes({"x", "x", "x", "x", "x"}), {both, both, both, both, both}, true)
                  .device_of_rank,
              ElementsAre(0, 1, 0, 1, 0));
  EXPECT_THAT(bind_gpus(nodes({"x", "x", "x"}), {sees({"A"}), both, both}, true).device_of_rank,
              ElementsAre(0, 1, 0));
}

TEST(GpuBinding, NoGpuAnywhere) {
  const GpuBinding binding =
      bind_gpus(nodes({"x", "x"}), {sees_none("no driver"), sees_none("no driver")}, false);
  EXPECT_FALSE(binding.any);
  EXPECT_EQ(binding.obstacle, "no driver");
}

TEST(GpuBinding, ARankWithoutAGpuIsNamedAndGpusOfOthersAreNoticed) {
  const GpuBinding binding =
      bind_gpus(nodes({"x", "y"}), {sees({"A"}), sees_none("none visible")}, false);
  EXPECT_TRUE(binding.any);
  EXPECT_EQ(binding.obstacle, "rank 1: none visible");
  const GpuBinding shared =
      bind_gpus(nodes({"x", "y"}), {sees({"A"}), sees_none("none visible")}, true);
  EXPECT_EQ(shared.obstacle, "rank 1: none visible");
}

TEST(GpuBinding, ABrokenDriverMeansThatThereAreGpus) {
  const GpuBinding binding = bind_gpus(nodes({"x"}), {sees_none("the driver fails", true)}, false);
  EXPECT_TRUE(binding.any);
  EXPECT_EQ(binding.obstacle, "the driver fails");
}

}  // namespace
}  // namespace annulus
