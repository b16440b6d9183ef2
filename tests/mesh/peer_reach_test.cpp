#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/mesh/peer_reach.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>

namespace annulus {
namespace {

using ::testing::ElementsAre;

TEST(PeerReach, RanksOfANodeAreAClique) {
  const PeerReach reach = PeerReach::from(std::vector<PeerReach::Finding>{
      {{2}, "0 and 1"}, {{3}, "1 and 0"}, {{0}, "2 and 1"}, {{1}, "3 and 0"}});
  EXPECT_THAT(reach.clique_of_rank, ElementsAre(0, 1, 0, 1));
  EXPECT_EQ(reach.obstacle, "0 and 1");
  EXPECT_EQ(reach.extent(), PeerExtent::some);
  EXPECT_TRUE(reach.connects(0, 2) && reach.connects(3, 1) && reach.connects(1, 1));
  EXPECT_FALSE(reach.connects(0, 1) || reach.connects(3, 2));
}

TEST(PeerReach, OneCliqueIsAll) {
  const PeerReach reach =
      PeerReach::from(std::vector<PeerReach::Finding>{{{1, 2}, ""}, {{0, 2}, ""}, {{0, 1}, ""}});
  EXPECT_THAT(reach.clique_of_rank, ElementsAre(0, 0, 0));
  EXPECT_EQ(reach.obstacle, "");
  EXPECT_EQ(reach.extent(), PeerExtent::all);
}

TEST(PeerReach, BothSidesMustReach) {
  const PeerReach reach =
      PeerReach::from(std::vector<PeerReach::Finding>{{{1}, ""}, {{}, "1 cannot open 0"}});
  EXPECT_THAT(reach.clique_of_rank, ElementsAre(0, 1));
  EXPECT_EQ(reach.obstacle, "1 cannot open 0");
  EXPECT_EQ(reach.extent(), PeerExtent::none);
}

TEST(PeerReach, AllOfACliqueReachEachOther) {
  // A chain: 0 and 2 both reach 1, but not each other.
  const PeerReach reach = PeerReach::from(std::vector<PeerReach::Finding>{
      {{1}, "0 and 2"}, {{0, 2}, "1 and 3"}, {{1, 3}, "2 and 0"}, {{2}, "3 and 0"}});
  EXPECT_THAT(reach.clique_of_rank, ElementsAre(0, 0, 1, 1));
}

TEST(PeerReach, Nowhere) {
  const PeerReach reach = PeerReach::nowhere(3, "no CUDA");
  EXPECT_THAT(reach.clique_of_rank, ElementsAre(0, 1, 2));
  EXPECT_EQ(reach.obstacle, "no CUDA");
  EXPECT_EQ(reach.extent(), PeerExtent::none);
}

TEST(PeerReach, SeveralGroupsTogether) {
  using enum PeerExtent;
  const auto of = [](std::vector<PeerExtent> extents) { return joint(extents); };
  EXPECT_EQ(of({all, all}), all);
  EXPECT_EQ(of({none, none, none}), none);
  EXPECT_EQ(of({some}), some);
  EXPECT_EQ(of({all, none}), some);
  EXPECT_EQ(of({none, some, none}), some);
}

TEST(PeerReach, DecidesOnTheTransports) {
  EXPECT_THAT(device_transports(PeerExtent::all), ElementsAre(Transport::peer, Transport::nccl));
  EXPECT_THAT(device_transports(PeerExtent::some),
              ElementsAre(Transport::composite, Transport::nccl));
  EXPECT_THAT(device_transports(PeerExtent::none), ElementsAre(Transport::nccl));
}

}  // namespace
}  // namespace annulus
