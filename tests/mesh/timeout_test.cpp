#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/host_stream.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>

#include "tests/mesh/world_group.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const Watchdog kHasty{Watchdog::Seconds(1)};
constexpr std::size_t kBytes = 3 << 19;  // 1.5 MiB: too much to leave before it is received

// Rank 0 comes late; the patient group keeps the ranks in step around the timeouts.
class TimeoutTest : public ::testing::Test {
 protected:
  const std::unique_ptr<Group> patient_ = test::make_world_group();
  const int rank_ = patient_->rank();
  const int size_ = patient_->size();
  HostStream stream_{"communication", kHasty, nullptr};
  std::vector<char> data_ = std::vector<char>(kBytes, static_cast<char>(rank_ + 1));
};

TEST_F(TimeoutTest, AMissingSenderIsNamedWithStepAndBytes) {
  const auto group = test::make_world_group(kHasty);
  const Receive receive{0, data_.data(), kBytes};
  if (rank_ == 1) {
    group->exchange({}, {&receive, 1}, stream_, {"key/value", 2});
    EXPECT_THAT(
        test::message_of<TimeoutError>([&] { stream_.synchronize(); }),
        StartsWith("step 2: waiting for 1.5 MiB of key/value from rank 0 (no progress for"));
  }
  patient_->control().barrier();
  // The late message still arrives.
  if (rank_ == 0) {
    const Send send{1, data_.data(), kBytes};
    group->exchange({&send, 1}, {}, stream_, {"key/value", 2});
  }
  stream_.synchronize();
  if (rank_ == 1) {
    EXPECT_EQ(data_, std::vector<char>(kBytes, 1));
  }
  patient_->control().barrier();
}

TEST_F(TimeoutTest, AMissingReceiverIsNamed) {
  const auto group = test::make_world_group(kHasty);
  if (rank_ == 1) {
    const Send send{0, data_.data(), kBytes};
    group->exchange({&send, 1}, {}, stream_, {"outputs", -1});
    EXPECT_THAT(test::message_of<TimeoutError>([&] { stream_.synchronize(); }),
                StartsWith("waiting for 1.5 MiB of outputs to be taken by rank 0"));
  }
  patient_->control().barrier();
  if (rank_ == 0) {
    const Receive receive{1, data_.data(), kBytes};
    group->exchange({}, {&receive, 1}, stream_, {"outputs", -1});
  }
  stream_.synchronize();
  patient_->control().barrier();
}

TEST_F(TimeoutTest, RanksOfAGroupAreNamedByTheMesh) {
  const auto group = test::make_reversed_group(kHasty);
  const int last = size_ - 1;  // rank 0 of the mesh
  int value = 0;
  if (group->rank() == 0) {
    const Receive receive{last, &value, sizeof(value)};
    group->exchange({}, {&receive, 1}, stream_, {"lengths", 7});
    EXPECT_THAT(test::message_of<TimeoutError>([&] { stream_.synchronize(); }),
                StartsWith("step 7: waiting for 4 B of lengths from rank 0 (no progress"));
  }
  patient_->control().barrier();
  if (group->rank() == last) {
    const Send send{0, &value, sizeof(value)};
    group->exchange({&send, 1}, {}, stream_, {"lengths", 7});
  }
  stream_.synchronize();
  patient_->control().barrier();
}

TEST_F(TimeoutTest, RanksOfTheMeshAreTranslatedToThoseOfMpirun) {
  const auto group = test::make_renumbered_group(kHasty);
  const int last = size_ - 1;  // mpirun's rank 0
  if (group->rank() != last) {
    EXPECT_THAT(
        test::message_of<TimeoutError>([&] { group->control().barrier(); }),
        StartsWith("barrier: waiting for rank " + std::to_string(last) + " (mpirun rank 0)"));
  }
  patient_->control().barrier();
}

TEST_F(TimeoutTest, OnlyThePeersThatAreStillPendingAreNamed) {
  if (size_ < 3) GTEST_SKIP() << "needs 3 ranks";
  const auto group = test::make_world_group(kHasty);
  std::vector<int> values(static_cast<std::size_t>(size_), -1);
  const Send send{1, &rank_, sizeof(rank_)};
  if (rank_ >= 2) group->exchange({&send, 1}, {}, stream_, {"data", 0});
  stream_.synchronize();
  patient_->control().barrier();
  if (rank_ == 1) {
    std::vector<Receive> receives;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != 1) receives.push_back({peer, &values[static_cast<std::size_t>(peer)], 4});
    }
    group->exchange({}, receives, stream_, {"data", 0});
    EXPECT_THAT(test::message_of<TimeoutError>([&] { stream_.synchronize(); }),
                AllOf(HasSubstr("from rank 0"), Not(HasSubstr("from rank 2"))));
  }
  patient_->control().barrier();
  if (rank_ == 0) group->exchange({&send, 1}, {}, stream_, {"data", 0});
  stream_.synchronize();
  if (rank_ == 1) {
    EXPECT_EQ(values[0], 0);
    EXPECT_EQ(values[2], 2);
  }
  patient_->control().barrier();
}

TEST_F(TimeoutTest, ControlCallsSayWhichCallWaitedForWhom) {
  struct Call {
    std::string expected;
    std::function<void(Control&)> run;
  };
  const UserError error("bad window");
  const std::vector<double> values{1.0, 2.0};
  const std::vector<Call> calls{
      {"start: waiting for rank 0 to arrive (no progress",
       [](Control& ranks) { ranks.barrier("start"); }},
      {"names: waiting for rank 0 to give its text (no progress",
       [](Control& ranks) { (void)ranks.gather_text("x", "names"); }},
      {"work: waiting for rank 0 to give 16 B (no progress",
       [&](Control& ranks) { (void)ranks.sum(values, "work"); }},
      {"time of a call: waiting for rank 0 to give 16 B (no progress",
       [&](Control& ranks) { (void)ranks.max(values, "time of a call"); }},
      {"agreement on errors: waiting for rank 0 to give its text (no progress",
       [](Control& ranks) { agree(ranks, nullptr); }},
      {"planning: agreement on errors: waiting for rank 0 to give its text (no progress",
       [](Control& ranks) { collectively(ranks, "planning", [] {}); }},
      {"rank " + std::to_string(rank_) + ": bad window (and then agreement on errors: ",
       [&](Control& ranks) { agree(ranks, &error); }},
  };
  for (const Call& call : calls) {
    // A group of its own, as nothing is defined after a timeout but to leave.
    const auto group = test::make_world_group(kHasty);
    if (rank_ != 0) {
      EXPECT_THAT(test::message_of<TimeoutError>([&] { call.run(group->control()); }),
                  StartsWith(call.expected));
    }
    patient_->control().barrier();
  }
}

TEST_F(TimeoutTest, AnAbsentReaderIsNamedWithTheBytesThatItShouldTake) {
  const auto group = test::make_world_group(kHasty);
  if (rank_ == 1) {
    EXPECT_THAT(test::message_of<TimeoutError>([&] {
                  (void)group->control().collect_text(std::string(kBytes, 'x'), "traces");
                }),
                StartsWith("traces: waiting for rank 0 to take 1.5 MiB (no progress"));
  }
  patient_->control().barrier();
}

// One rank computes for several timeouts and moves its streams along meanwhile, as a kernel does.
TEST(Heartbeats, AHealthyRankMayComputeLongerThanTheTimeout) {
  const int size = test::size();
  if (size < 2) GTEST_SKIP() << "needs 2 ranks";
  using Clock = std::chrono::steady_clock;
  Mesh mesh(MeshShape({{"sp", size}}), test::bootstrap(), Watchdog(Watchdog::Seconds(0.5)));
  HostStream stream("communication", mesh.watchdog(), nullptr);
  if (mesh.rank() == 0) {
    for (const auto begin = Clock::now(); Clock::now() - begin < std::chrono::seconds(2);) {
      stream.progress();
    }
  }
  EXPECT_NO_THROW(mesh.world().barrier());
}

// One rank works outside any stream, like an oracle or a disk.
TEST(Heartbeats, ComputingIsNoSilence) {
  const int size = test::size();
  if (size < 2) GTEST_SKIP() << "needs 2 ranks";
  Mesh mesh(MeshShape({{"sp", size}}), test::bootstrap(), Watchdog(Watchdog::Seconds(1)));
  if (mesh.rank() == size - 1) {
    const Computing computing = mesh.world().computing();
    std::this_thread::sleep_for(std::chrono::seconds(3));
  }
  EXPECT_NO_THROW(mesh.world().barrier());
}

// The last rank works for a mesh of its own, and another mesh waits for it.
TEST(Heartbeats, AMeshGivesThemToThoseThatItsWatchdogConnects) {
  const int size = test::size();
  if (size < 2) GTEST_SKIP() << "needs 2 ranks";
  Mesh everyone(MeshShape({{"sp", size}}), test::bootstrap(), Watchdog(Watchdog::Seconds(1)));
  if (everyone.rank() == size - 1) {
    Mesh alone(MeshShape({{"sp", 1}}), MPI_COMM_SELF, everyone.watchdog());
    for (const auto begin = std::chrono::steady_clock::now();
         std::chrono::steady_clock::now() - begin < std::chrono::seconds(3);) {
      alone.watchdog().beat();
    }
  }
  EXPECT_NO_THROW(everyone.world().barrier());
}

TEST(Heartbeats, ARankThatHangsIsSilentInTheEnd) {
  const int size = test::size();
  if (size < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto patient = test::make_world_group();
  Mesh mesh(MeshShape({{"sp", size}}), test::bootstrap(), Watchdog(Watchdog::Seconds(1)));
  if (mesh.rank() == size - 1) {
    const Computing computing = mesh.world().computing(1);
    std::this_thread::sleep_for(std::chrono::seconds(6));
  } else {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THAT(test::message_of<TimeoutError>([&] { mesh.world().barrier(); }),
                StartsWith("barrier: waiting for rank " + std::to_string(size - 1)));
    EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1500));
  }
  patient->control().barrier();
}

// Another rank computes all the while, which must not hide that the last one is gone.
TEST(Heartbeats, ASilentPeerIsNoticedWhileAnotherRankComputes) {
  const int size = test::size();
  if (size < 3) GTEST_SKIP() << "needs 3 ranks";
  const auto patient = test::make_world_group();
  Mesh mesh(MeshShape({{"sp", size}}), test::bootstrap(), Watchdog(Watchdog::Seconds(1)));
  Group& group = mesh.group();
  HostStream stream("communication", mesh.watchdog(), nullptr);
  const int silent = size - 1;
  if (mesh.rank() == 0) {
    const Computing computing = mesh.world().computing();
    std::this_thread::sleep_for(std::chrono::seconds(6));
  } else if (mesh.rank() == silent) {
    std::this_thread::sleep_for(std::chrono::seconds(6));
  } else {
    std::vector<char> data(kBytes);
    const Receive receive{silent, data.data(), kBytes};
    const auto begin = std::chrono::steady_clock::now();
    group.exchange({}, {&receive, 1}, stream, {"key/value", 2});
    const std::string name = "rank " + std::to_string(silent);
    EXPECT_THAT(test::message_of<TimeoutError>([&] { stream.synchronize(); }),
                AllOf(StartsWith("step 2: waiting for 1.5 MiB of key/value from " + name +
                                 " (no progress for"),
                      HasSubstr("no heartbeat from " + name)));
    EXPECT_LE(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
  }
  patient->control().barrier();
}

// Where all wait for each other, they do not keep each other waiting.
TEST(Heartbeats, RanksThatWaitForEachOtherGiveUp) {
  const int size = test::size();
  if (size < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto patient = test::make_world_group();
  Mesh mesh(MeshShape({{"sp", size}}), test::bootstrap(), Watchdog(Watchdog::Seconds(1)));
  Group& group = mesh.group();
  HostStream stream("communication", mesh.watchdog(), nullptr);
  // All wait for their neighbour, and nobody sends.
  std::vector<char> data(kBytes);
  const Receive receive{(mesh.rank() + 1) % size, data.data(), kBytes};
  group.exchange({}, {&receive, 1}, stream, {"key/value", 2});
  patient->control().barrier();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(test::message_of<TimeoutError>([&] { stream.synchronize(); }),
              AllOf(StartsWith("step 2: waiting for"), Not(HasSubstr("no heartbeat"))));
  EXPECT_LE(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  patient->control().barrier();
}

// All ranks must search together to find out whom they reach, with or without a GPU.
TEST(MeshTransports, AFailedSearchIsNotRemembered) {
  const int size = test::size();
  if (size < 2) GTEST_SKIP() << "needs 2 ranks";
  const auto patient = test::make_world_group();
  Mesh mesh(MeshShape({{"sp", size}}), test::bootstrap(), kHasty);
  (void)mesh.group();
  patient->control().barrier();
  if (mesh.rank() == 0) {
    const AxisNames axes{"sp"};
    for (int again = 0; again < 2; ++again) {
      EXPECT_THROW((void)mesh.transports(axes, Place::cuda(0)), TimeoutError) << again;
    }
  }
  patient->control().barrier();
}

}  // namespace
}  // namespace annulus
