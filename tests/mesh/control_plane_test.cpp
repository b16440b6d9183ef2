// The control plane of thousands of ranks, in one process: the code that MPI ranks run, over
// messages that are counted.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>

#include "control/heartbeat_state.hpp"
#include "control/roll_call.hpp"
#include "tests/mesh/fabric.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::size_t log2_of(int size) {
  return static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(size) - 1));
}

class ControlPlane : public ::testing::TestWithParam<int> {
 protected:
  /// Runs one call on all ranks. Each rank sends and receives O(log P) messages, to and from as
  /// many others; all together 2(P − 1) messages per tree, with at most `bytes` each on average.
  void expect_cheap(const char* name, const std::function<void(Control&)>& call, std::size_t trees,
                    std::size_t bytes) {
    fabric_.forget_counts();
    fabric_.run([&](int rank) { call(fabric_.control(rank)); });
    const auto ranks = static_cast<std::size_t>(size_);
    EXPECT_LE(fabric_.most_messages(), 2 * trees * (log2_of(size_) + 1)) << name;
    EXPECT_LE(fabric_.most_peers(), log2_of(size_) + 1) << name;
    EXPECT_LE(fabric_.all_messages(), 2 * trees * ranks) << name;
    EXPECT_LE(fabric_.all_bytes(), bytes * 2 * trees * ranks) << name;
    RecordProperty(std::string(name) + "_messages_of_a_rank",
                   static_cast<int>(fabric_.most_messages()));
    RecordProperty(std::string(name) + "_peers_of_a_rank", static_cast<int>(fabric_.most_peers()));
    std::printf(
        "  %5d ranks: %-28s %4zu messages and %3zu peers of a rank at most, %8zu B in all\n", size_,
        name, fabric_.most_messages(), fabric_.most_peers(), fabric_.all_bytes());
  }

  const int size_ = GetParam();
  test::Fabric fabric_{size_};
};

constexpr std::size_t kHead = 64;  // the number and the purpose of a call

TEST_P(ControlPlane, Barrier) {
  expect_cheap(
      "barrier", [](Control& ranks) { ranks.barrier(); }, 1, kHead);
}

TEST_P(ControlPlane, Sum) {
  const auto call = [this](Control& ranks) { EXPECT_EQ(ranks.sum(std::vector{1.0})[0], size_); };
  expect_cheap("sum", call, 1, kHead);
}

TEST_P(ControlPlane, AgreementWithoutError) {
  expect_cheap(
      "agreement", [](Control& ranks) { agree(ranks, nullptr); }, 1, kHead);
}

TEST_P(ControlPlane, AgreementOnAnErrorOfSomeRanks) {
  const auto call = [this](Control& ranks) {
    const UserError error("no such file");
    const UserError other("another");
    const int rank = ranks.rank();
    const Error* const mine = rank == size_ - 1 ? &other : rank == size_ / 2 ? &error : nullptr;
    EXPECT_EQ(
        test::message_of<UserError>([&] { agree(ranks, mine); }),
        "rank " + std::to_string(size_ / 2) + ": no such file (1 more rank has a different error)");
  };
  if (size_ < 3) GTEST_SKIP() << "needs 3 ranks";
  expect_cheap("agreement on an error", call, 1, 2 * kHead);
}

// Each rank's text names the rank, so that all differ.
TEST_P(ControlPlane, AgreementWhereAllFailDifferently) {
  const auto call = [this](Control& ranks) {
    const UserError error("rank " + std::to_string(ranks.rank()) + " has no memory");
    EXPECT_THAT(test::message_of<UserError>([&] { agree(ranks, &error); }),
                HasSubstr(size_ > 2 ? "(" + std::to_string(size_ - 1) + " more ranks" : "rank "));
  };
  expect_cheap("agreement on P errors", call, 1, 1200);
}

TEST_P(ControlPlane, TheSamePlan) {
  const std::string text(4000, 'x');
  const auto call = [&](Control& ranks) {
    EXPECT_EQ(ranks.first_difference(text, "what to compute"), std::nullopt);
  };
  expect_cheap("same plan", call, 1, kHead);
}

TEST_P(ControlPlane, AnotherPlanOfOneRank) {
  const int odd = size_ - 1;
  if (odd == 0) GTEST_SKIP() << "needs 2 ranks";
  const auto call = [&](Control& ranks) {
    const auto other =
        ranks.first_difference(ranks.rank() == odd ? "theirs" : "ours", "what to compute");
    ASSERT_TRUE(other.has_value());
    EXPECT_EQ(other->rank, odd);
    EXPECT_EQ(other->text, "theirs");
    EXPECT_EQ(other->expected, "ours");
  };
  expect_cheap("another plan", call, 3, kHead);
}

TEST_P(ControlPlane, DistinctTexts) {
  const auto call = [](Control& ranks) {
    EXPECT_LE(ranks.distinct_texts(ranks.rank() % 2 == 0 ? "a" : "b", "kinds").size(), 2U);
  };
  expect_cheap("distinct texts", call, 1, 2 * kHead);
}

// The nodes of the ranks: neighbours have the same text.
TEST_P(ControlPlane, TextsOfNeighboursThatAreAlike) {
  const auto call = [this](Control& ranks) {
    const auto texts = ranks.gather_text(std::to_string(ranks.rank() * 4 / size_), "nodes");
    ASSERT_EQ(texts.size(), static_cast<std::size_t>(size_));
    EXPECT_EQ(texts.back(), std::to_string((size_ - 1) * 4 / size_));
  };
  expect_cheap("gather of 4 nodes", call, 1, 3 * kHead);
}

// A result of P texts goes up once; nothing comes down.
TEST_P(ControlPlane, CollectsOnRankZero) {
  const auto call = [this](Control& ranks) {
    const auto texts = ranks.collect_text(std::to_string(ranks.rank()), "traces");
    ASSERT_EQ(texts.size(), ranks.rank() == 0 ? static_cast<std::size_t>(size_) : 0U);
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      EXPECT_EQ(texts[rank], std::to_string(rank));
    }
  };
  expect_cheap("collect on rank 0", call, 1, kHead + 24 * (log2_of(size_) + 1));
}

TEST_P(ControlPlane, AnErrorOnTheWayIsEveryones) {
  if (size_ == 1) GTEST_SKIP() << "needs 2 ranks";
  const auto call = [this](Control& ranks) {
    const std::vector<double> values(ranks.rank() == size_ - 1 ? 1 : 2);
    EXPECT_THROW((void)ranks.sum(values), InternalError);
  };
  expect_cheap("an error", call, 1, 2 * kHead);
}

// All ranks but one wait in a barrier, and all give up at the same time.
TEST_P(ControlPlane, RollCallNamesTheAbsentRank) {
  if (size_ == 1) GTEST_SKIP() << "needs 2 ranks";
  for (const int absent : {0, 1, size_ / 2, size_ - 1}) {
    test::Fabric fabric(size_);
    fabric.run([&](int rank) {
      if (rank == absent) return;
      // Whom TreeControl waits for: the child in whose subtree a rank is missing, else its parent.
      int awaited = rank & (rank - 1);
      for (int bit = 1; (rank & bit) == 0 && rank + bit < size_; bit <<= 1) {
        const int child = rank + bit;
        if (child <= absent && absent < child + bit) awaited = child;
      }
      RollCall roll_call(0.05, fabric.short_messages(rank));
      EXPECT_EQ(roll_call.absent(awaited), absent) << rank;
    });
    // Between two neighbours of the tree: two questions, two responses, two answers at most.
    EXPECT_LE(fabric.all_messages(), 6 * static_cast<std::size_t>(size_));
    EXPECT_LE(fabric.most_messages(), 6 * (log2_of(size_) + 1));
    EXPECT_LE(fabric.most_peers(), log2_of(size_) + 1);
    std::printf(
        "  %5d ranks: roll call, rank %4d absent: %zu messages and %zu peers of a rank at "
        "most, %zu messages in all\n",
        size_, absent, fabric.most_messages(), fabric.most_peers(), fabric.all_messages());
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ControlPlane, ::testing::Values(1, 2, 3, 5, 8, 1024, 4096));

/// The heartbeats of all ranks of a job; messages arrive within a step of time.
class HeartbeatsOfAll {
 public:
  HeartbeatsOfAll(int size, double interval, double step) : step_(step) {
    for (int rank = 0; rank < size; ++rank) states_.emplace_back(1, rank, size, interval, 0.0);
    for (const HeartbeatState& state : states_) {
      neighbours = std::max(neighbours, state.neighbours().size());
    }
  }

  /// Until `end`, in seconds.
  void run(double end) {
    for (; now < end; now += step_) {
      std::vector<std::tuple<int, int, std::string>> sent;
      for (int rank = 0; rank < static_cast<int>(states_.size()); ++rank) {
        if (deaf.contains(rank)) continue;
        const auto message = state(rank).due(computing.contains(rank), now);
        if (!message) continue;
        for (const int peer : state(rank).neighbours()) sent.emplace_back(rank, peer, *message);
        longest = std::max(longest, message->size());
      }
      for (const auto& [from, to, message] : sent) {
        bytes += message.size();
        ++messages;
        if (!deaf.contains(to)) state(to).take(from, message, now);
      }
    }
  }
  HeartbeatState& state(int rank) { return states_[static_cast<std::size_t>(rank)]; }
  double silence(int rank, int peer) {
    return state(rank).silence([peer] { return std::vector{peer}; }, now);
  }

  std::set<int> computing;
  std::set<int> deaf;  // neither send nor take anything
  double now = 0;
  std::size_t messages = 0;
  std::size_t bytes = 0;
  std::size_t longest = 0;
  std::size_t neighbours = 0;

 private:
  double step_;
  std::vector<HeartbeatState> states_;
};

TEST(HeartbeatPlane, AMinuteOf4096Ranks) {
  constexpr int kRanks = 4096;
  HeartbeatsOfAll all(kRanks, 1, 0.05);
  all.computing = {777};
  all.run(60);
  EXPECT_LE(all.neighbours, 2 * log2_of(kRanks));
  // One round of messages per interval, and a second where news are passed on.
  EXPECT_LE(all.messages, 2U * 60 * kRanks * all.neighbours);
  EXPECT_LE(all.bytes, 12 * all.messages);
  std::printf("  %d ranks, a minute: %.1f messages of 12 B per second and rank, %zu peers\n",
              kRanks, static_cast<double>(all.messages) / 60 / kRanks, all.neighbours);
  for (int rank = 0; rank < kRanks; ++rank) {
    ASSERT_LE(all.silence(rank, (rank + 1) % kRanks), 2.0) << rank;
  }
}

class HeartbeatRanks : public ::testing::TestWithParam<int> {};

TEST_P(HeartbeatRanks, AllLearnThatARankIsSilentAndThatItIsBack) {
  const int ranks = GetParam();
  HeartbeatsOfAll all(ranks, 1, 0.05);
  const int silent = ranks - 1;
  all.computing = {0};  // which must not hide it
  all.run(10);
  all.deaf = {silent};
  all.run(15);
  for (int rank = 0; rank < silent; ++rank) {
    ASSERT_THAT(all.state(rank).silent_ranks(), ElementsAre(silent)) << rank;
    ASSERT_GE(all.silence(rank, silent), 4) << rank;
    ASSERT_LE(all.silence(rank, 0), 2) << rank;
  }
  EXPECT_LE(all.longest, HeartbeatState::kMaximumBytes);
  all.deaf.clear();
  all.run(20);
  for (int rank = 0; rank < silent; ++rank) {
    ASSERT_THAT(all.state(rank).silent_ranks(), IsEmpty()) << rank;
  }
  all.deaf = {silent};
  all.run(25);
  for (int rank = 0; rank < silent; ++rank) {
    ASSERT_THAT(all.state(rank).silent_ranks(), ElementsAre(silent)) << rank;
  }
}

// They do other things for a while, and carry nothing on.
TEST_P(HeartbeatRanks, DeafRanksDoNotCutOthersOff) {
  const int ranks = GetParam();
  if (ranks < 4) GTEST_SKIP() << "needs 4 ranks";
  HeartbeatsOfAll all(ranks, 1, 0.05);
  all.computing = {ranks - 1};
  all.deaf = {1, 2};
  all.run(20);
  for (int rank = 0; rank < ranks; ++rank) {
    if (all.deaf.contains(rank)) continue;
    ASSERT_LE(all.silence(rank, ranks - 1), 2) << rank;
    ASSERT_THAT(all.state(rank).silent_ranks(), ElementsAre(1, 2)) << rank;
  }
}

// More than one message names: four nodes of eight ranks.
TEST(HeartbeatPlane, AllLearnOfManySilentRanks) {
  constexpr int kRanks = 256;
  HeartbeatsOfAll all(kRanks, 1, 0.05);
  all.computing = {kRanks - 1};
  all.run(10);
  for (int rank = 100; rank < 132; ++rank) all.deaf.insert(rank);
  all.run(40);
  EXPECT_LE(all.longest, HeartbeatState::kMaximumBytes);
  for (int rank = 0; rank < kRanks; ++rank) {
    if (all.deaf.contains(rank)) continue;
    ASSERT_THAT(all.state(rank).silent_ranks(), ElementsAreArray(all.deaf)) << rank;
    ASSERT_GE(all.silence(rank, 131), 20) << rank;
  }
}

TEST_P(HeartbeatRanks, WhereNobodyComputesTheTimeGrows) {
  HeartbeatsOfAll all(GetParam(), 1, 0.05);
  all.computing = {0};
  all.run(5);
  all.computing.clear();
  all.run(15);
  for (int rank = 0; rank < GetParam(); ++rank) {
    ASSERT_GE(all.silence(rank, 0), 9) << rank;
    ASSERT_THAT(all.state(rank).silent_ranks(), IsEmpty()) << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, HeartbeatRanks, ::testing::Values(2, 3, 4, 8, 1000));

TEST(HeartbeatPlane, MessagesOfAnEarlierMeshCountForNothing) {
  HeartbeatState old(1, 0, 2, 1, 0);
  HeartbeatState fresh(2, 1, 2, 1, 0);
  fresh.take(0, old.due(true, 2).value(), 2);
  EXPECT_GE(fresh.silence({}, 2), 1e9);
}

}  // namespace
}  // namespace annulus
