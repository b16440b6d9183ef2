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
  if (rank_ == 1) {
    test::receive(*group, {0, data_.data(), kBytes}, stream_, {"key/value", 2});
    EXPECT_THAT(
        test::message_of<TimeoutError>([&] { stream_.synchronize(); }),
        StartsWith("step 2: waiting for 1.5 MiB of key/value from rank 0 (no progress for"));
  }
  patient_->control().barrier();
  // The late message still arrives.
  if (rank_ == 0) {
    test::send(*group, {1, data_.data(), kBytes}, stream_, {"key/value", 2});
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
    test::send(*group, {0, data_.data(), kBytes}, stream_, {"outputs", -1});
    EXPECT_THAT(test::message_of<TimeoutError>([&] { stream_.synchronize(); }),
                StartsWith("waiting for 1.5 MiB of outputs to be taken by rank 0"));
  }
  patient_->control().barrier();
  if (rank_ == 0) test::receive(*group, {1, data_.data(), kBytes}, stream_, {"outputs", -1});
  stream_.synchronize();
  patient_->control().barrier();
}

TEST_F(TimeoutTest, RanksOfAGroupAreNamedByTheMesh) {
  const auto group = test::make_reversed_group(kHasty);
  const int last = size_ - 1;  // rank 0 of the mesh
  int value = 0;
  if (group->rank() == 0) {
    test::receive(*group, {last, &value, sizeof(value)}, stream_, {"lengths", 7});
    EXPECT_THAT(test::message_of<TimeoutError>([&] { stream_.synchronize(); }),
                StartsWith("step 7: waiting for 4 B of lengths from rank 0 (no progress"));
  }
  patient_->control().barrier();
  if (group->rank() == last) {
    test::send(*group, {0, &value, sizeof(value)}, stream_, {"lengths", 7});
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
  const Send to_rank_1{1, &rank_, sizeof(rank_)};
  if (rank_ >= 2) test::send(*group, to_rank_1, stream_, {"data", 0});
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
  if (rank_ == 0) test::send(*group, to_rank_1, stream_, {"data", 0});
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

class Heartbeats : public ::testing::Test {
 protected:
  using Clock = std::chrono::steady_clock;

  void SetUp() override {
    if (size_ < 2) GTEST_SKIP() << "needs 2 ranks";
  }
  static void repeat_for(Clock::duration time, const std::function<void()>& step) {
    for (const auto begin = Clock::now(); Clock::now() - begin < time;) step();
  }

  const int size_ = test::size();
  const int last_ = size_ - 1;
  const std::unique_ptr<Group> patient_ = test::make_world_group();
  Mesh mesh_{MeshShape({{"sp", size_}}), test::bootstrap(), kHasty};
  HostStream stream_{"communication", mesh_.watchdog(), nullptr};
  std::vector<char> data_ = std::vector<char>(kBytes);
};

// One rank computes for several timeouts. Its stream makes progress meanwhile, as under a kernel.
TEST_F(Heartbeats, AHealthyRankMayComputeLongerThanTheTimeout) {
  if (mesh_.rank() == 0) repeat_for(std::chrono::seconds(3), [&] { stream_.progress(); });
  EXPECT_NO_THROW(mesh_.world().barrier());
}

// One rank works outside any stream, like an oracle or a disk.
TEST_F(Heartbeats, ComputingIsNotSilence) {
  if (mesh_.rank() == last_) {
    const Computing computing = mesh_.world().computing();
    std::this_thread::sleep_for(std::chrono::seconds(3));
  }
  EXPECT_NO_THROW(mesh_.world().barrier());
}

// The last rank works for a mesh of its own, and another mesh waits for it.
TEST_F(Heartbeats, BeatsReachAllMeshesThatAWatchdogConnects) {
  if (mesh_.rank() == last_) {
    Mesh alone(MeshShape({{"sp", 1}}), MPI_COMM_SELF, mesh_.watchdog());
    repeat_for(std::chrono::seconds(3), [&] { alone.watchdog().beat(); });
  }
  EXPECT_NO_THROW(mesh_.world().barrier());
}

TEST_F(Heartbeats, ARankThatHangsFallsSilent) {
  if (mesh_.rank() == last_) {
    const Computing computing = mesh_.world().computing(1);
    std::this_thread::sleep_for(std::chrono::seconds(6));
  } else {
    const auto begin = Clock::now();
    EXPECT_THAT(test::message_of<TimeoutError>([&] { mesh_.world().barrier(); }),
                StartsWith("barrier: waiting for rank " + std::to_string(last_)));
    EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(1500));
  }
  patient_->control().barrier();
}

// Another rank computes all the while, which must not hide that the last one is gone.
TEST_F(Heartbeats, ASilentPeerIsNoticedWhileAnotherRankComputes) {
  if (size_ < 3) GTEST_SKIP() << "needs 3 ranks";
  Group& group = mesh_.group();
  if (mesh_.rank() == 0) {
    const Computing computing = mesh_.world().computing();
    std::this_thread::sleep_for(std::chrono::seconds(6));
  } else if (mesh_.rank() == last_) {
    std::this_thread::sleep_for(std::chrono::seconds(6));
  } else {
    const auto begin = Clock::now();
    test::receive(group, {last_, data_.data(), kBytes}, stream_, {"key/value", 2});
    const std::string name = "rank " + std::to_string(last_);
    EXPECT_THAT(test::message_of<TimeoutError>([&] { stream_.synchronize(); }),
                AllOf(StartsWith("step 2: waiting for 1.5 MiB of key/value from " + name +
                                 " (no progress for"),
                      HasSubstr("no heartbeat from " + name)));
    EXPECT_LE(Clock::now() - begin, std::chrono::seconds(4));
  }
  patient_->control().barrier();
}

// Where all wait for each other, they do not keep each other waiting.
TEST_F(Heartbeats, RanksThatWaitForEachOtherGiveUp) {
  // All wait for their neighbour, and nobody sends.
  test::receive(mesh_.group(), {(mesh_.rank() + 1) % size_, data_.data(), kBytes}, stream_,
                {"key/value", 2});
  patient_->control().barrier();
  const auto begin = Clock::now();
  EXPECT_THAT(test::message_of<TimeoutError>([&] { stream_.synchronize(); }),
              AllOf(StartsWith("step 2: waiting for"), Not(HasSubstr("no heartbeat"))));
  EXPECT_LE(Clock::now() - begin, std::chrono::seconds(10));
  patient_->control().barrier();
}

// All ranks must search together to find out whom they reach, with or without a GPU.
using MeshTransports = Heartbeats;
TEST_F(MeshTransports, AFailedSearchIsNotRemembered) {
  (void)mesh_.group();
  patient_->control().barrier();
  if (mesh_.rank() == 0) {
    const AxisNames axes{"sp"};
    for (int again = 0; again < 2; ++again) {
      EXPECT_THROW((void)mesh_.transports(axes, Place::cuda(0)), TimeoutError) << again;
    }
  }
  patient_->control().barrier();
}

}  // namespace
}  // namespace annulus
