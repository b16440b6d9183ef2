#include <chrono>
#include <functional>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/give_up_on_error.hpp>

#include "tests/mesh/device_group_fixture.hpp"
#include "tests/support/environment_variable.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// A message to the right neighbour and one from the left, prepared.
struct Hop {
  Hop(Group& group, std::size_t bytes, Buffer to, Buffer from, int left, int right)
      : out(std::move(to)), in(std::move(from)) {
    exchange =
        group.prepare({{right, out.data(), bytes}}, {{left, in.data(), bytes}}, {"key/value", 3});
  }
  Buffer out;
  Buffer in;
  std::unique_ptr<PreparedExchange> exchange;
};

class DeviceGroup : public DeviceGroupTest {
 protected:
  Hop make_hop(std::size_t bytes) {
    return {group(), bytes, allocate(bytes), allocate(bytes), left(), right()};
  }
  static std::uint32_t key(int from, int round) {
    return static_cast<std::uint32_t>(from * 1000 + round);
  }
  /// One round of a hop, with data of its own, started by `start`.
  void check_round(Hop& hop, int round, const std::function<void()>& start) {
    const std::size_t bytes = hop.out.bytes();
    upload(hop.out, pattern(bytes, key(rank(), round)));
    start();
    ASSERT_EQ(download(hop.in), pattern(bytes, key(left(), round)))
        << bytes << " bytes, round " << round;
  }
  void check_rounds(Hop& hop, int rounds) {
    for (int round = 0; round < rounds; ++round) {
      check_round(hop, round, [&] { hop.exchange->post(stream()); });
    }
  }
};

TEST_P(DeviceGroup, SaysWhatItIs) {
  EXPECT_EQ(group().rank(), rank());
  EXPECT_EQ(group().size(), size());
  EXPECT_EQ(group().place(), device().place());
  EXPECT_EQ(group().transport(), name_of(GetParam()));
  EXPECT_NO_THROW(group().check());
}

TEST_P(DeviceGroup, APreparedHopIsPostedOverAndOver) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{12345}, kMiB}) {
    Hop hop = make_hop(bytes);
    check_rounds(hop, 20);
    stream().synchronize();
  }
  Hop hop = make_hop(64 * kMiB);
  check_rounds(hop, 4);
  EXPECT_NO_THROW(group().check());
}

// NCCL takes calls together. If the calls of the failed exchange were left open, the calls of the
// next exchanges would join them and never start.
TEST_P(DeviceGroup, AnErrorBetweenNcclsCallsDoesNotTakeInLaterOnes) {
  if (GetParam() != Transport::nccl) GTEST_SKIP() << "of NCCL only";
  Hop hop = make_hop(kMiB);
  {
    const std::unique_ptr<NcclGroups> groups =
        make_nccl_groups(world(), device().place(), kWatchdog);
    const std::unique_ptr<Group> other = groups->make(host());
    const Buffer buffer = allocate(1);
    const int nobody = size();
    EXPECT_THAT(message_of<LibraryError>([&] {
                  other->exchange(std::vector<Send>{{nobody, buffer.data(), 1}}, {}, stream(),
                                  {"a message to nobody"});
                }),
                HasSubstr("ncclSend"));
    other->give_up();
  }
  check_rounds(hop, 2);
  EXPECT_NO_THROW(group().check());
}

// A peer may have mapped what was sent from; what was received into is this rank's alone.
TEST_P(DeviceGroup, MemoryThatNoPeerMappedGoesBack) {
  if (GetParam() != Transport::peer) GTEST_SKIP() << "of transport peer only";
  // Larger than any block that another test has left in the pool.
  constexpr std::size_t kBytes = 96 * kMiB;
  MemoryPool& pool = group().exchange_memory(device().memory());
  pool.trim();
  const std::size_t before = pool.statistics().reserved;
  const bool sends = size() > 1;
  {
    Hop hop = make_hop(kBytes);
    check_rounds(hop, 2);
    stream().synchronize();
    world().barrier();
  }
  EXPECT_EQ(pool.statistics().reserved, before + 2 * kBytes);
  pool.trim();
  EXPECT_EQ(pool.statistics().reserved, before + (sends ? kBytes : 0));
  Hop again = make_hop(kBytes);
  check_rounds(again, 2);
  EXPECT_EQ(pool.statistics().reserved, before + 2 * kBytes);
}

TEST_P(DeviceGroup, ManyPostsMayBeInFlight) {
  constexpr int kPosts = 100;
  constexpr std::size_t kBytes = 4096;
  // Every post forwards what the one before brought: after n posts, this rank has the data of the
  // rank n places to the left.
  Hop hop = make_hop(kBytes);
  upload(hop.out, pattern(kBytes, key(rank(), 0)));
  for (int i = 0; i < kPosts; ++i) {
    hop.exchange->post(stream());
    check_cuda(
        cudaMemcpyAsync(hop.out.data(), hop.in.data(), kBytes, cudaMemcpyDefault, raw_stream()),
        "handing on");
  }
  const int origin = ((rank() - kPosts) % size() + size()) % size();
  EXPECT_EQ(download(hop.in), pattern(kBytes, key(origin, 0)));
}

TEST_P(DeviceGroup, SeveralMessagesBothWays) {
  const std::vector<std::size_t> rightward{1, 70001, 0, 300000};
  const std::vector<std::size_t> leftward{513, kMiB};
  std::vector<Buffer> out;
  std::vector<Buffer> in;
  std::vector<Send> sends;
  std::vector<Receive> receives;
  const auto add = [&](const std::vector<std::size_t>& sizes, int to, int from) {
    for (const std::size_t bytes : sizes) {
      out.push_back(allocate(bytes));
      in.push_back(allocate(bytes));
      sends.push_back({to, out.back().data(), bytes});
      receives.push_back({from, in.back().data(), bytes});
    }
  };
  add(rightward, right(), left());
  add(leftward, left(), right());
  const auto exchange = group().prepare(sends, receives, {"blocks", 0});
  for (int round = 0; round < 5; ++round) {
    const auto number = [&](std::size_t i) { return round * 10 + static_cast<int>(i); };
    for (std::size_t i = 0; i < out.size(); ++i) {
      upload(out[i], pattern(out[i].bytes(), key(rank(), number(i))));
    }
    exchange->post(stream());
    for (std::size_t i = 0; i < in.size(); ++i) {
      const int from = i < rightward.size() ? left() : right();
      EXPECT_EQ(download(in[i]), pattern(in[i].bytes(), key(from, number(i)))) << "message " << i;
    }
  }
}

// In a composite group, the two messages go different ways.
TEST_P(DeviceGroup, AMessageToItselfBesideAHop) {
  constexpr std::size_t kBytes = 700'001;
  const Buffer out = allocate(kBytes);
  const Buffer in = allocate(kBytes);
  const Buffer own = allocate(kBytes);
  const auto exchange =
      group().prepare({{right(), out.data(), kBytes}, {rank(), out.data(), kBytes}},
                      {{left(), in.data(), kBytes}, {rank(), own.data(), kBytes}}, {"blocks", 0});
  const auto check = [&](int round, const std::function<void()>& start) {
    upload(out, pattern(kBytes, key(rank(), round)));
    start();
    EXPECT_EQ(download(in), pattern(kBytes, key(left(), round))) << "round " << round;
    EXPECT_EQ(download(own), pattern(kBytes, key(rank(), round))) << "round " << round;
  };
  const auto post = [&] { exchange->post(stream()); };
  for (int round = 0; round < 5; ++round) check(round, post);
  const std::unique_ptr<Recording> recording = device().record(stream(), post);
  for (int round = 5; round < 20; ++round) check(round, [&] { recording->submit(stream()); });
  check(20, post);
}

TEST_P(DeviceGroup, ACapturedExchangeCanBeReplayed) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{12345}, 8 * kMiB}) {
    Hop hop = make_hop(bytes);
    check_rounds(hop, 1);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaStreamBeginCapture(raw_stream(), cudaStreamCaptureModeRelaxed), "begin capture");
    hop.exchange->post(stream());
    check_cuda(cudaStreamEndCapture(raw_stream(), &graph), "end capture");
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    for (int round = 1; round <= 20; ++round) {
      check_round(hop, round,
                  [&] { check_cuda(cudaGraphLaunch(executable, raw_stream()), "replay"); });
    }
    // A replay leaves nothing behind that would disturb an ordinary post.
    check_rounds(hop, 2);
    check_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
}

TEST_P(DeviceGroup, ExchangesRunBesideOtherWork) {
  const std::unique_ptr<Stream> other = device().make_stream("compute", kWatchdog, nullptr);
  const Buffer from = device().memory().allocate(64 * kMiB);
  const Buffer to = device().memory().allocate(64 * kMiB);
  Hop hop = make_hop(kMiB);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 20; ++i) {
      check_cuda(cudaMemcpyAsync(to.data(), from.data(), from.bytes(), cudaMemcpyDefault,
                                 CudaStream::of(*other).raw()),
                 "load");
    }
    check_round(hop, round, [&] { hop.exchange->post(stream()); });
  }
  other->synchronize();
}

TEST_P(DeviceGroup, UnpreparedExchange) {
  constexpr std::size_t kBytes = 5000;
  const Buffer out = allocate(kBytes);
  const Buffer in = allocate(kBytes);
  const Send send{right(), out.data(), kBytes};
  const Receive receive{left(), in.data(), kBytes};
  for (int round = 0; round < 3; ++round) {
    upload(out, pattern(kBytes, key(rank(), round)));
    group().exchange({&send, 1}, {&receive, 1}, stream(), {"key/value", round});
    EXPECT_EQ(download(in), pattern(kBytes, key(left(), round)));
  }
}

// More than 16,384 flags on every rank, which are taken as they are needed.
TEST_P(DeviceGroup, TensOfThousandsOfMessagesMayBePrepared) {
  if (size() < 2) GTEST_SKIP() << "needs 2 ranks";
  if (GetParam() != Transport::peer) GTEST_SKIP() << "NCCL prepares nothing";
  constexpr std::size_t kExchanges = 9000;
  const Buffer out = allocate(16);
  const Buffer in = allocate(16);
  std::vector<std::unique_ptr<PreparedExchange>> exchanges;
  for (std::size_t i = 0; i < kExchanges; ++i) {
    exchanges.push_back(group().prepare({{right(), out.data(), 16}}, {{left(), in.data(), 16}},
                                        {"key/value", static_cast<int>(i)}));
  }
  for (const std::size_t i : {std::size_t{0}, kExchanges / 2, kExchanges - 1}) {
    upload(out, pattern(16, key(rank(), static_cast<int>(i % 100))));
    exchanges[i]->post(stream());
    EXPECT_EQ(download(in), pattern(16, key(left(), static_cast<int>(i % 100)))) << i;
  }
}

// An exchange submitted twice must be released twice, without the caller's help.
TEST_P(DeviceGroup, AGroupThatIsGivenUpLetsAllItsPostsPass) {
  if (size() < 2) GTEST_SKIP() << "needs 2 ranks";
  if (GetParam() != Transport::peer) GTEST_SKIP() << "NCCL ends its kernels";
  Mesh mesh(MeshShape({{"sp", size()}}), bootstrap(), kWatchdog);
  Group& group = mesh.group(device().place(), GetParam());
  MemoryPool& memory = group.exchange_memory(device().memory());
  Hop hop(group, kMiB, memory.allocate(kMiB), memory.allocate(kMiB), left(), right());
  if (rank() == 0) {  // whose left neighbour never comes
    for (int i = 0; i < 50; ++i) hop.exchange->post(stream());
    group.give_up();
    EXPECT_THROW(group.check(), LibraryError);
    for (int i = 0; i < 3; ++i) EXPECT_THROW(hop.exchange->post(stream()), LibraryError);
    stream().synchronize();
  }
  world().barrier();
}

TEST_P(DeviceGroup, SizesThatDifferAreTheErrorOfBothSides) {
  if (size() < 2) GTEST_SKIP() << "needs 2 ranks";
  if (GetParam() != Transport::peer) GTEST_SKIP() << "NCCL does not compare sizes";
  const Buffer buffer = allocate(16);
  std::string error = "not asked";
  if (rank() == 0) {
    error = message_of<LibraryError>([&] {
      (void)group().prepare({{1, buffer.data(), 8}}, {}, {"key/value", 0});
    });
  } else if (rank() == 1) {
    error = message_of<LibraryError>([&] {
      (void)group().prepare({}, {{0, buffer.data(), 16}}, {"key/value", 0});
    });
  }
  if (rank() < 2) {
    EXPECT_EQ(error, "key/value: rank 0 sends 8 bytes to rank 1, which expects 16");
  }
  Hop hop = make_hop(1000);
  check_rounds(hop, 2);
}

TEST_P(DeviceGroup, AnErrorOfOneRankReachesItsPeer) {
  if (size() < 2) GTEST_SKIP() << "needs 2 ranks";
  if (GetParam() != Transport::peer) GTEST_SKIP() << "NCCL prepares nothing";
  const Buffer buffer = allocate(16);
  const Bytes on_host(16);
  if (rank() == 0) {
    EXPECT_THAT(message_of<LibraryError>([&] {
                  (void)group().prepare({{1, on_host.data(), 16}}, {}, {"key/value", 0});
                }),
                HasSubstr("is the buffer"));
  } else if (rank() == 1) {
    EXPECT_THAT(message_of<LibraryError>([&] {
                  (void)group().prepare({}, {{0, buffer.data(), 16}}, {"key/value", 0});
                }),
                AllOf(HasSubstr("rank 0: "), HasSubstr("is the buffer")));
  }
  Hop hop = make_hop(1000);
  check_rounds(hop, 2);
}

TEST_P(DeviceGroup, ARankThatNeverPostsIsATimeoutOfTheOther) {
  if (size() < 2) GTEST_SKIP() << "needs 2 ranks";
  constexpr std::size_t kBytes = 4096;
  const Watchdog hasty{Watchdog::Seconds(1)};
  const std::unique_ptr<Stream> impatient = device().make_stream("hasty", hasty, nullptr);
  Hop hop = make_hop(kBytes);
  check_rounds(hop, 1);  // NCCL connects at the first post, which takes both
  upload(hop.out, pattern(kBytes, key(rank(), 9)));
  stream().synchronize();
  if (rank() != 0) {
    hop.exchange->post(*impatient);
    if (rank() == 1) {  // whose left neighbour is missing
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_THROW(impatient->synchronize(), TimeoutError);
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    }
  }
  world().barrier();
  // The late one is still welcome.
  if (rank() == 0) hop.exchange->post(*impatient);
  stream().wait(impatient->record());
  EXPECT_EQ(download(hop.in), pattern(kBytes, key(left(), 9)));
}

// Work that waits on the device for the missing rank would block the release of the buffers.
TEST_P(DeviceGroup, WorkThatIsGivenUpLetsBuffersGo) {
  if (size() < 2) GTEST_SKIP() << "needs 2 ranks";
  constexpr std::size_t kBytes = kMiB;
  const bool stays_away = rank() == size() - 1;
  const auto begin = std::chrono::steady_clock::now();
  bool timed_out = false;
  {
    // On a busy machine, ranks may start more than a second apart.
    const Watchdog patient{Watchdog::Seconds(10)};
    const Watchdog hasty{Watchdog::Seconds(1)};
    Mesh mesh(MeshShape({{"sp", size()}}), bootstrap(), patient);
    Group& group = mesh.group(device().place(), GetParam());
    MemoryPool& memory = group.exchange_memory(device().memory());
    try {
      const std::unique_ptr<Stream> impatient = device().make_stream("hasty", hasty, nullptr);
      Hop hop(group, kBytes, memory.allocate(kBytes), memory.allocate(kBytes), left(), right());
      const GiveUpOnError guard(group);
      hop.exchange->post(*impatient);
      impatient->synchronize();
      if (stays_away) {
        world().barrier();
      } else {
        hop.exchange->post(*impatient);
        impatient->synchronize();
      }
    } catch (const TimeoutError&) {
      timed_out = true;
    }
    if (!stays_away) world().barrier();
    // Ranks whose neighbours are all there may have ended well.
    EXPECT_TRUE(timed_out || rank() != 0);
    world().barrier();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(40));
}

INSTANTIATE_TEST_SUITE_P(Transports, DeviceGroup,
                         ::testing::Values(Transport::peer, Transport::nccl, Transport::composite),
                         [](const auto& test) { return std::string(name_of(test.param)); });

class DeviceMesh : public DeviceGroupTest {};

TEST_P(DeviceMesh, GroupsAlongTwoAxes) {
  if (size() != 4) GTEST_SKIP() << "needs 4 ranks";
  Mesh mesh(MeshShape({{"dp", 2}, {"sp", 2}}), bootstrap(), kWatchdog);
  for (const AxisNames& axes :
       {AxisNames{"dp"}, AxisNames{"sp"}, AxisNames{"dp", "sp"}, AxisNames{"sp", "dp"}}) {
    Group& along = mesh.group(axes, device().place(), GetParam());
    EXPECT_EQ(along.transport(), name_of(GetParam()));
    EXPECT_EQ(&mesh.group(axes, device().place(), GetParam()), &along);
    const std::vector<int> members = mesh.shape().group(rank(), axes);
    MemoryPool& pool = along.exchange_memory(device().memory());
    const Buffer mine = pool.allocate(sizeof(int));
    const Buffer all = pool.allocate(members.size() * sizeof(int));
    upload_values(mine, std::vector<int>{rank()});
    std::vector<Send> sends;
    std::vector<Receive> receives;
    for (int peer = 0; peer < along.size(); ++peer) {
      EXPECT_EQ(along.mesh_rank(peer), members[static_cast<std::size_t>(peer)]);
      sends.push_back({peer, mine.data(), sizeof(int)});
      receives.push_back({peer, static_cast<int*>(all.data()) + peer, sizeof(int)});
    }
    along.exchange(sends, receives, stream(), {"ranks", -1});
    EXPECT_EQ(download_values<int>(all), members);
  }
}

TEST_P(DeviceMesh, AutomaticTakesTheFirstTransportThatFits) {
  if (size() < 2) GTEST_SKIP() << "needs 2 ranks";
  Mesh mesh(MeshShape({{"sp", size()}}), bootstrap(), kWatchdog);
  const AxisNames axes{"sp"};
  const std::vector<Transport> fitting = mesh.transports(axes, device().place());
  EXPECT_EQ(fitting, device_transports(peer_copy_reach(mesh.group(), device().place()).extent()));
  if (fitting.front() != Transport::peer && shared_gpus()) GTEST_SKIP() << "NCCL needs more GPUs";
  Group& chosen = mesh.group(axes, device().place());
  EXPECT_EQ(chosen.transport(), name_of(fitting.front()));
  EXPECT_EQ(&mesh.group(axes, device().place(), fitting.front()), &chosen);
}

TEST_P(DeviceMesh, AutomaticTakesCompositeAcrossNodes) {
  if (size() != 4 || shared_gpus()) GTEST_SKIP() << "needs 4 ranks with a GPU each";
  const EnvironmentVariable node("ANNULUS_NODE", rank() < 2 ? "one" : "two");
  Mesh mesh(MeshShape({{"node", 2}, {"gpu", 2}}), bootstrap(), kWatchdog);
  const auto transport_along = [&](const AxisNames& axes) {
    return mesh.group(axes, device().place()).transport();
  };
  EXPECT_EQ(transport_along({"node", "gpu"}), "composite");
  EXPECT_EQ(transport_along({"gpu"}), "peer");
  EXPECT_EQ(transport_along({"node"}), "nccl");
  EXPECT_EQ(message_of<UnsupportedError>(
                [&] { (void)mesh.group(AxisNames{"node"}, device().place(), Transport::peer); }),
            "transport peer: ranks 0 and 2 are on different nodes");
}

INSTANTIATE_TEST_SUITE_P(Transports, DeviceMesh,
                         ::testing::Values(Transport::peer, Transport::nccl, Transport::composite),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST(SharedGpu, IsRefusedByNcclWithAWayOut) {
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) GTEST_SKIP() << reason;
  if (nccl_versions().built == "not built") GTEST_SKIP() << "this build has no NCCL";
  if (test::size() < 2) GTEST_SKIP() << "needs 2 ranks";
  const std::unique_ptr<Device> device = make_cuda_device(0);
  Mesh mesh(MeshShape({{"sp", test::size()}}), bootstrap(), kWatchdog);
  const AxisNames axes{"sp"};
  EXPECT_THAT(
      message_of<UnsupportedError>(
          [&] { (void)mesh.group(axes, device->place(), Transport::nccl); }),
      AllOf(HasSubstr("ranks 0 and 1 share a GPU"), HasSubstr("--transport peer --share-gpus")));
}

}  // namespace
}  // namespace annulus::test
