#include <algorithm>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/cores.hpp>
#include <annulus/mesh/first_ranks.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/node_order.hpp>

#include "tests/mesh/world_group.hpp"
#include "tests/support/environment_variable.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Topology on_nodes(const std::vector<std::string>& nodes) {
  std::vector<std::string> seats;
  for (const std::string& node : nodes) seats.push_back(node + "\n" + node);
  return Topology::from_seats(seats);
}

TEST(NodeOrder, RanksOfANodeFollowEachOther) {
  EXPECT_THAT(node_order(on_nodes({"a", "b", "a", "b"})), ElementsAre(0, 2, 1, 3));
  EXPECT_THAT(node_order(on_nodes({"b", "a", "c", "a", "b"})), ElementsAre(0, 4, 1, 3, 2));
  EXPECT_THAT(node_order(on_nodes({"a", "a", "b", "b"})), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(node_order(on_nodes({"a"})), ElementsAre(0));
  EXPECT_THAT(node_order(Topology()), IsEmpty());
}

// A fast axis that crosses nodes in mpirun's order does not cross them in this one.
TEST(NodeOrder, FastAxesLieInsideNodes) {
  const std::vector<std::string> cyclic{"a", "b", "c", "a", "b", "c"};
  const MeshShape shape = MeshShape::parse("dp=3,sp=2", 6);
  EXPECT_TRUE(crosses_nodes(shape, on_nodes(cyclic), "sp"));
  std::vector<std::string> ordered;
  for (const int rank : node_order(on_nodes(cyclic))) {
    ordered.push_back(cyclic[static_cast<std::size_t>(rank)]);
  }
  EXPECT_FALSE(crosses_nodes(shape, on_nodes(ordered), "sp"));
  EXPECT_TRUE(crosses_nodes(shape, on_nodes(ordered), "dp"));
}

// Ranks 0, 2, … say that they are on one node, the others on another.
class PretendedNodes : public ::testing::Test {
 protected:
  const int rank_ = test::session().rank();
  const int size_ = test::session().size();
  const int nodes_ = std::min(size_, 2);
  test::EnvironmentVariable node_{"ANNULUS_NODE", rank_ % 2 == 0 ? "even" : "odd"};
  // mpirun's ranks in order of the nodes.
  std::vector<int> expected() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; rank += 2) ranks.push_back(rank);
    for (int rank = 1; rank < size_; rank += 2) ranks.push_back(rank);
    return ranks;
  }
};

TEST_F(PretendedNodes, AreNodesOfTheTopologyOnOneMachine) {
  Mesh mesh("sp=-1", test::session().world(), test::kWatchdog);
  ASSERT_EQ(mesh.topology().nodes(), nodes_);
  EXPECT_EQ(mesh.topology().node_names.front(), "even");
  EXPECT_EQ(mesh.topology().node_names.back(), size_ == 1 ? "even" : "odd");
  EXPECT_EQ(mesh.crosses_nodes("sp"), size_ > 1);
  for (int rank = 0; rank < size_; ++rank) {
    EXPECT_EQ(mesh.topology().node_of_rank[static_cast<std::size_t>(rank)], rank % 2);
  }
  const Topology machines = Topology::of_machines(mesh.world());
  EXPECT_EQ(machines.nodes(), 1);
  EXPECT_THAT(machines.node_of_rank, Each(0));
}

TEST_F(PretendedNodes, ShareTheCoresOfTheMachine) {
  Mesh mesh("sp=-1", test::session().world(), test::kWatchdog);
  const int pretending = threads_per_rank(mesh, 0);
  ::unsetenv("ANNULUS_NODE");
  EXPECT_EQ(pretending, threads_per_rank(mesh, 0));
}

TEST_F(PretendedNodes, GiveACommunicatorItsOrder) {
  const Communicator ordered = in_node_order(test::session().world(), test::kWatchdog);
  if (test::session().world() == MPI_COMM_NULL) {
    EXPECT_FALSE(ordered);
    return;
  }
  Mesh mesh("sp=-1", ordered.get(), test::kWatchdog);
  std::vector<std::string> ranks;
  for (const int rank : expected()) ranks.push_back(std::to_string(rank));
  EXPECT_EQ(mesh.world().gather_text(std::to_string(rank_)), ranks);
  const std::vector<int>& nodes = mesh.topology().node_of_rank;
  EXPECT_TRUE(std::is_sorted(nodes.begin(), nodes.end()));
}

TEST_F(PretendedNodes, NumberTheRanksOfASession) {
  MpiSession session(nullptr, nullptr);  // MPI runs already if it runs at all
  EXPECT_EQ(session.rank_name(), "rank " + std::to_string(rank_));
  session.number_by_node(test::kWatchdog);
  EXPECT_EQ(session.size(), size_);
  const std::vector<int> order = expected();
  EXPECT_EQ(session.mpirun_ranks(), order);
  EXPECT_EQ(order[static_cast<std::size_t>(session.rank())], rank_);
  EXPECT_EQ(session.rank_name(), session.rank() == rank_
                                     ? "rank " + std::to_string(rank_)
                                     : "rank " + std::to_string(session.rank()) + " (mpirun rank " +
                                           std::to_string(rank_) + ")");
}

TEST(NodeName, ABadOneIsAnErrorOnEveryRank) {
  const int last = test::session().size() - 1;
  const test::EnvironmentVariable node("ANNULUS_NODE",
                                       test::session().rank() == last ? "a b" : "a");
  EXPECT_THAT(test::message_of<UserError>(
                  [] { const Mesh mesh("sp=-1", test::session().world(), test::kWatchdog); }),
              AllOf(HasSubstr("ANNULUS_NODE: got 'a b'"), HasSubstr("letters"),
                    HasSubstr(last > 0 ? "rank " + std::to_string(last) : "")));
}

// mpirun's last rank does not come to a collective call until the others have gone on. `step` is 1
// for mpirun's order of the ranks, −1 for the reverse.
template <class Call, class Late>
void expect_name_of_the_last(int step, const std::string& expected, const Call& call,
                             const Late& late) {
  const Watchdog hasty(Watchdog::Seconds(1));
  const auto patient = test::make_world_group();
  const int rank = test::session().rank();
  const bool is_last = rank == test::session().size() - 1;
  MPI_Comm split = MPI_COMM_NULL;
  // Never freed: messages of the call that fails stay under way, and MPI may use the communicator's
  // number again.
  check_mpi(MPI_Comm_split(test::session().world(), 0, step * rank, &split), "MPI_Comm_split");
  if (!is_last) {
    EXPECT_THAT(test::message_of<TimeoutError>([&] { call(split, hasty); }),
                HasSubstr(expected + " to arrive (no progress"));
  }
  patient->control().barrier();
  if (is_last) late(split, hasty);
  patient->control().barrier();
}

void number_by_node(MPI_Comm ranks, const Watchdog& watchdog) {
  (void)in_node_order(ranks, watchdog);
}
void number_by_node_in_vain(MPI_Comm ranks, const Watchdog& watchdog) {
  EXPECT_THROW(number_by_node(ranks, watchdog), TimeoutError);
}

TEST(InNodeOrder, NamesTheRankThatDoesNotCome) {
  if (test::session().size() == 1) GTEST_SKIP() << "needs 2 ranks";
  const std::string last = std::to_string(test::session().size() - 1);
  expect_name_of_the_last(1, "order of the ranks: waiting for rank " + last, number_by_node,
                          number_by_node_in_vain);
}

TEST(InNodeOrder, NamesItByMpirunsNumberToo) {
  if (test::session().size() == 1) GTEST_SKIP() << "needs 2 ranks";
  const std::string last = std::to_string(test::session().size() - 1);
  expect_name_of_the_last(-1, "order of the ranks: waiting for rank 0 (mpirun rank " + last + ")",
                          number_by_node, number_by_node_in_vain);
}

TEST(FirstRanks, KeepTheirNumbers) {
  const int size = test::session().size();
  for (int count = 1; count <= size; ++count) {
    const Communicator first = first_ranks(test::session().world(), count, test::kWatchdog, {});
    const bool among = test::session().world() != MPI_COMM_NULL && test::session().rank() < count;
    ASSERT_EQ(static_cast<bool>(first), among);
    if (!among) continue;
    Mesh mesh("sp=-1", first.get(), test::kWatchdog);
    EXPECT_EQ(mesh.size(), count);
    EXPECT_EQ(mesh.rank(), test::session().rank());
  }
}

TEST(FirstRanks, NamesTheRankThatDoesNotCome) {
  if (test::session().size() == 1) GTEST_SKIP() << "needs 2 ranks";
  const std::string last = std::to_string(test::session().size() - 1);
  expect_name_of_the_last(
      1, "first ranks: waiting for rank " + last,
      [](MPI_Comm ranks, const Watchdog& watchdog) { (void)first_ranks(ranks, 1, watchdog, {}); },
      // It does not come to the split, which nobody leaves before all have come.
      [](MPI_Comm /*ranks*/, const Watchdog& /*watchdog*/) {});
}

}  // namespace
}  // namespace annulus
