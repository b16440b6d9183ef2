#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/mesh/mesh.hpp>

#include "tests/mesh/world_group.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/thrown_by.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

int world_size() {
  return test::size();
}

Mesh make_mesh(MeshShape shape) {
  return Mesh(std::move(shape), test::bootstrap(), test::kWatchdog);
}

// Ways to lay the ranks on three axes.
std::vector<MeshShape> shapes() {
  std::vector<MeshShape> result;
  for (int dp = 1; dp <= world_size(); ++dp) {
    for (int tp = 1; tp <= world_size() / dp; ++tp) {
      if (world_size() % (dp * tp) != 0) continue;
      result.emplace_back(
          std::vector<MeshAxis>{{"dp", dp}, {"tp", tp}, {"sp", world_size() / (dp * tp)}});
    }
  }
  return result;
}

TEST(Mesh, GroupsOfEveryTupleOfAxes) {
  const std::vector<AxisNames> tuples{{},
                                      {"dp"},
                                      {"tp"},
                                      {"sp"},
                                      {"dp", "sp"},
                                      {"sp", "dp"},
                                      {"tp", "sp"},
                                      {"sp", "tp", "dp"},
                                      {"dp", "tp", "sp"}};
  for (const MeshShape& shape : shapes()) {
    Mesh mesh = make_mesh(shape);
    EXPECT_EQ(mesh.shape(), shape);
    EXPECT_EQ(mesh.size(), world_size());
    EXPECT_EQ(mesh.rank(), test::rank());
    for (const AxisNames& axes : tuples) {
      Group& group = mesh.group(axes);
      const std::vector<int> members = shape.group(mesh.rank(), axes);
      ASSERT_EQ(group.size(), static_cast<int>(members.size()));
      ASSERT_EQ(group.rank(), shape.coordinate(mesh.rank(), axes));
      const auto ranks = group.control().gather_text(std::to_string(mesh.rank()));
      for (std::size_t i = 0; i < members.size(); ++i) {
        ASSERT_EQ(ranks[i], std::to_string(members[i]));
      }
      EXPECT_EQ(&mesh.group(axes), &group) << "kept";
      if (members.size() == 1) {
        EXPECT_EQ(group.transport(), "self");
      }
    }
  }
}

TEST(Mesh, NeighboursAlongAnAxisExchange) {
  Mesh mesh = make_mesh(MeshShape::parse("dp=1,sp=-1", world_size()));
  const AxisNames axes{"dp", "sp"};
  Group& group = mesh.group(axes);
  HostStream stream("communication", mesh.watchdog(), nullptr);
  const int next = (group.rank() + 1) % group.size();
  const int previous = (group.rank() + group.size() - 1) % group.size();
  const int out = mesh.rank();
  int in = -1;
  test::exchange(group, {next, &out, sizeof(out)}, {previous, &in, sizeof(in)}, stream);
  stream.synchronize();
  EXPECT_EQ(in, previous);
}

// The last rank sends a heartbeat to ranks that have ended the mesh. It must not reach the mesh
// that they make then, of which the last rank is no part.
TEST(Mesh, HeartbeatsOfAnEndedMeshReachNoOther) {
  if (test::session().world() == MPI_COMM_NULL) GTEST_SKIP() << "no MPI";
  if (world_size() < 3) GTEST_SKIP() << "needs three ranks";
  const bool last = test::rank() == world_size() - 1;
  MPI_Comm raw = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split(test::session().world(), last ? 1 : 0, test::rank(), &raw),
            "MPI_Comm_split");
  const Communicator others(raw);
  for (int i = 0; i < 3; ++i) {
    {
      const Mesh mesh("sp=-1", test::session().world(), Watchdog(Watchdog::Seconds(0.2)));
      if (last) {
        std::this_thread::sleep_for(std::chrono::milliseconds(60));  // a heartbeat is due then
        mesh.watchdog().beat();
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(last ? 40 : 100));
    const Mesh smaller("sp=-1", others.get(), test::kWatchdog);
    EXPECT_EQ(smaller.size(), last ? 1 : world_size() - 1);
  }
}

TEST(Mesh, OverASubCommunicator) {
  if (test::session().world() == MPI_COMM_NULL) GTEST_SKIP() << "no MPI";
  MPI_Comm raw = MPI_COMM_NULL;
  const int parity = test::rank() % 2;
  check_mpi(MPI_Comm_split(test::session().world(), parity, -test::rank(), &raw), "MPI_Comm_split");
  int size = 0;
  check_mpi(MPI_Comm_size(raw, &size), "MPI_Comm_size");
  // The mesh keeps a duplicate: the original may go.
  Mesh mesh(MeshShape::parse("sp=-1", size), Communicator(raw).get(), test::kWatchdog);
  EXPECT_EQ(mesh.size(), size);
  const AxisNames axes{"sp"};
  const auto ranks = mesh.group(axes).control().gather_text(std::to_string(test::rank()));
  std::vector<std::string> expected;
  for (int rank = world_size() - 1; rank >= 0; --rank) {
    if (rank % 2 == parity) expected.push_back(std::to_string(rank));
  }
  EXPECT_EQ(ranks, expected);
  EXPECT_EQ(mesh.topology().node_of_rank.size(), static_cast<std::size_t>(size));
}

TEST(Mesh, AWrongProductIsAnErrorOnEveryRank) {
  const auto error = test::thrown_by<ArgumentError>([&] {
    const Mesh mesh = make_mesh(MeshShape({{"dp", 3}, {"sp", world_size()}}));
  });
  EXPECT_EQ(error.argument(), "mesh");
  EXPECT_THAT(error.value(), HasSubstr("dp=3,sp=" + std::to_string(world_size())));
  EXPECT_THAT(error.expected(), HasSubstr("product is " + std::to_string(world_size())));
}

TEST(Mesh, DifferentShapesAreAnErrorOnEveryRank) {
  if (world_size() == 1) GTEST_SKIP() << "needs 2 ranks";
  const char* name = test::rank() == 1 ? "tp" : "sp";
  EXPECT_THAT(test::message_of<ArgumentError>([&] {
                const Mesh mesh = make_mesh(MeshShape({{name, world_size()}}));
              }),
              AllOf(HasSubstr("tp="), HasSubstr("on rank 1"), HasSubstr("sp=")));
}

TEST(Mesh, BadTuplesAreErrors) {
  Mesh mesh = make_mesh(MeshShape::parse("sp=-1,dp=1", world_size()));
  const AxisNames unknown{"sp", "ep"};
  EXPECT_THROW((void)mesh.group(unknown), UnknownAxisError);
  EXPECT_THROW((void)mesh.crosses_nodes("ep"), UnknownAxisError);
  const AxisNames twice{"sp", "sp"};
  const AxisNames twice_small{"dp", "dp"};
  if (world_size() > 1) {
    EXPECT_THROW((void)mesh.group(twice), ArgumentError);
  }
  EXPECT_THROW((void)mesh.group(twice_small), ArgumentError);
}

// Needs no devices. Findings about the first device do not hold for the second.
TEST(Mesh, ARankHasOneDevice) {
  if (world_size() == 1) GTEST_SKIP() << "needs 2 ranks";
  Mesh mesh = make_mesh(MeshShape::parse("sp=-1", world_size()));
  const AxisNames axes{"sp"};
  try {
    (void)mesh.group(axes, Place::cuda(0));
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): no GPU, or a shared one
  }
  EXPECT_THROW((void)mesh.group(axes, Place::cuda(1)), ArgumentError);
  EXPECT_EQ(mesh.group(axes, Place::host()).transport(), "mpi");
}

TEST(Mesh, TopologyOfOneHost) {
  // The test programs run on one node.
  const Mesh mesh = make_mesh(MeshShape::parse("sp=-1", world_size()));
  const Topology& topology = mesh.topology();
  EXPECT_EQ(topology.nodes(), 1);
  EXPECT_FALSE(topology.node_names.front().empty());
  EXPECT_EQ(topology.ranks_on_node(0), world_size());
  EXPECT_THAT(topology.node_of_rank, Each(0));
  for (int rank = 0; rank < world_size(); ++rank) {
    EXPECT_EQ(topology.local_rank_of_rank[static_cast<std::size_t>(rank)], rank);
  }
  EXPECT_FALSE(mesh.crosses_nodes("sp"));
}

TEST(Topology, AxesThatCrossNodes) {
  const MeshShape shape = MeshShape::parse("dp=2,tp=2,sp=2", 8);
  const auto crossing = [&](std::vector<int> nodes) {
    Topology topology;
    topology.node_of_rank = std::move(nodes);
    std::string axes;
    for (const MeshAxis& axis : shape.axes()) {
      if (crosses_nodes(shape, topology, axis.name)) axes += axis.name + " ";
    }
    return axes;
  };
  EXPECT_EQ(crossing({0, 0, 0, 0, 0, 0, 0, 0}), "");
  EXPECT_EQ(crossing({0, 0, 0, 0, 1, 1, 1, 1}), "dp ");
  EXPECT_EQ(crossing({0, 0, 1, 1, 2, 2, 3, 3}), "dp tp ");
  EXPECT_EQ(crossing({0, 1, 0, 1, 0, 1, 0, 1}), "sp ");
  EXPECT_EQ(crossing({0, 0, 0, 0, 0, 0, 0, 1}), "dp tp sp ");
}

TEST(Topology, RanksOfANodeSayTheSame) {
  const Topology single = Topology::from_seats({"a\n1"});
  EXPECT_EQ(single.nodes(), 1);
  EXPECT_THAT(single.node_of_rank, ElementsAre(0));
  EXPECT_THAT(single.local_rank_of_rank, ElementsAre(0));
  // Two nodes may have one host name, and one kernel may go by two names.
  const Topology topology = Topology::from_seats({"a\n1", "a\n2", "b\n1", "a\n1", "a\n2", "a\n1"});
  EXPECT_THAT(topology.node_of_rank, ElementsAre(0, 1, 2, 0, 1, 0));
  EXPECT_THAT(topology.local_rank_of_rank, ElementsAre(0, 0, 0, 1, 1, 2));
  EXPECT_THAT(topology.node_names, ElementsAre("a", "a", "b"));
  EXPECT_EQ(topology.ranks_on_node(0), 3);
}

TEST(Communicator, NullMeansNothingToFree) {
  const Communicator none;
  EXPECT_FALSE(none);
  EXPECT_EQ(none.get(), MPI_COMM_NULL);
}

TEST(Mpi, ErrorsNameTheCallAndMpisText) {
  EXPECT_NO_THROW(check_mpi(MPI_SUCCESS, "MPI_Send"));
  const auto error = test::thrown_by<MpiError>([&] { check_mpi(MPI_ERR_TRUNCATE, "MPI_Recv"); });
  EXPECT_THAT(error.what(), HasSubstr("MPI_Recv: "));
  EXPECT_EQ(error.exit_code(), ExitCode::failure);
}

}  // namespace
}  // namespace annulus
