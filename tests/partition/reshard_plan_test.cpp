#include <map>
#include <optional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/reshard_plan.hpp>

#include "random_sharding.hpp"

namespace annulus {
namespace {

using test::linear;
using test::Random;

std::int64_t offset(const Extents& shape, const Extents& begin, const Extents& step,
                    const std::vector<std::int64_t>& index) {
  std::vector<std::int64_t> at;
  for (int dim = 0; dim < shape.rank(); ++dim) {
    at.push_back(begin[dim] + index[static_cast<std::size_t>(dim)] * step[dim]);
    EXPECT_LT(at.back(), shape[dim]);
  }
  return linear(shape, at);
}

// Global element numbers of a rank's shard, in local order.
std::vector<std::int64_t> contents(const NamedSharding& sharding, int rank) {
  std::vector<std::int64_t> numbers;
  test::for_each_entry(sharding.index(rank), [&](const auto&, const auto& global) {
    numbers.push_back(linear(sharding.global_shape(), global));
  });
  return numbers;
}

void carry_out(const ReshardBox& box, const std::vector<std::int64_t>& source,
               const Extents& source_shape, std::vector<std::optional<std::int64_t>>& destination,
               const Extents& destination_shape) {
  test::for_each_index(box.shape, [&](const std::vector<std::int64_t>& index) {
    const auto from =
        static_cast<std::size_t>(offset(source_shape, box.source_begin, box.source_step, index));
    const auto to = static_cast<std::size_t>(
        offset(destination_shape, box.destination_begin, box.destination_step, index));
    ASSERT_FALSE(destination[to].has_value()) << "written twice";
    destination[to] = source[from];
  });
}

TEST(ReshardPlan, MovesEveryElementOnce) {
  Random random(21);
  for (int trial = 0; trial < 400; ++trial) {
    const MeshShape mesh = test::random_mesh(random, test::draw(random, 1, 12));
    const auto [from, to] = test::random_shardings(random, mesh);
    SCOPED_TRACE(to_string(from) + " → " + to_string(to));
    const ReshardPlan plan = plan_reshard(from, to);
    for (int rank = 0; rank < mesh.ranks(); ++rank) {
      const std::vector<std::int64_t> expected = contents(to, rank);
      std::vector<std::optional<std::int64_t>> got(expected.size());
      for (const ReshardTransfer& transfer : plan.transfers) {
        if (transfer.destination != rank) continue;
        ASSERT_FALSE(transfer.boxes.empty());
        const std::vector<std::int64_t> source = contents(from, transfer.source);
        for (const ReshardBox& box : transfer.boxes) {
          ASSERT_NO_FATAL_FAILURE(
              carry_out(box, source, from.local_shape(transfer.source), got, to.local_shape(rank)));
        }
      }
      ASSERT_EQ(got, std::vector<std::optional<std::int64_t>>(expected.begin(), expected.end()));
    }
  }
}

TEST(ReshardPlan, OfOneRankIsItsPartOfTheWhole) {
  Random random(22);
  for (int trial = 0; trial < 50; ++trial) {
    const MeshShape mesh = test::random_mesh(random, test::draw(random, 1, 8));
    const auto [from, to] = test::random_shardings(random, mesh);
    const ReshardPlan whole = plan_reshard(from, to);
    for (int rank = 0; rank < mesh.ranks(); ++rank) {
      std::vector<ReshardTransfer> expected = whole.transfers;
      std::erase_if(expected, [&](const ReshardTransfer& transfer) {
        return transfer.source != rank && transfer.destination != rank;
      });
      EXPECT_EQ(plan_reshard(from, to, rank).transfers, expected);
    }
  }
}

TEST(ReshardPlan, TakesFromItselfWhatItHas) {
  Random random(23);
  for (int trial = 0; trial < 200; ++trial) {
    const MeshShape mesh = test::random_mesh(random, test::draw(random, 2, 12));
    const auto [from, to] = test::random_shardings(random, mesh);
    for (const ReshardTransfer& transfer : plan_reshard(from, to).transfers) {
      if (transfer.source == transfer.destination) continue;
      const std::vector<std::int64_t> mine = contents(from, transfer.destination);
      std::vector<std::int64_t> theirs = contents(from, transfer.source);
      EXPECT_NE(mine, theirs) << to_string(from);
    }
  }
  const MeshShape mesh({{"x", 4}});
  const NamedSharding whole(mesh, PartitionSpec(), {8});
  const NamedSharding cut(mesh, PartitionSpec::parse("x"), {8});
  for (const ReshardTransfer& transfer : plan_reshard(whole, cut).transfers) {
    EXPECT_EQ(transfer.source, transfer.destination);
  }
}

TEST(ReshardPlan, SpreadsTheLoadOverReplicas) {
  // Each half lies on 4 ranks; the 4 ranks of the other half want quarters of it.
  const MeshShape mesh({{"dp", 2}, {"sp", 4}});
  const NamedSharding to(mesh, PartitionSpec::parse("-,sp"), {16, 4});
  const NamedSharding from(mesh, PartitionSpec::parse("dp"), {16, 4});
  std::map<int, std::int64_t> sent;
  for (const ReshardTransfer& transfer : plan_reshard(from, to).transfers) {
    if (transfer.source != transfer.destination) sent[transfer.source] += transfer.elements();
  }
  ASSERT_EQ(sent.size(), 8U);
  for (const auto& [rank, elements] : sent) EXPECT_EQ(elements, 8) << "rank " << rank;
}

TEST(ReshardPlan, RefusesDifferentArraysOrMeshes) {
  const MeshShape mesh({{"x", 4}});
  const NamedSharding sharding(mesh, PartitionSpec(), {8});
  EXPECT_THROW((void)plan_reshard(sharding, NamedSharding(mesh, PartitionSpec(), {9})),
               ArgumentError);
  EXPECT_THROW(
      (void)plan_reshard(sharding, NamedSharding(MeshShape({{"y", 4}}), PartitionSpec(), {8})),
      ArgumentError);
}

TEST(ReshardPlan, MovesAScalar) {
  const NamedSharding scalar(MeshShape({{"x", 2}}), PartitionSpec(), {});
  const ReshardPlan plan = plan_reshard(scalar, scalar);
  ASSERT_EQ(plan.transfers.size(), 2U);
  EXPECT_EQ(plan.transfers[0].elements(), 1);
}

}  // namespace
}  // namespace annulus
