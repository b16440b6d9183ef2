// A composite of two groups over host memory: its rules have nothing to do with GPUs.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/host_stream.hpp>
#include <annulus/mesh/composite_group.hpp>

#include "composite/message_split.hpp"
#include "tests/mesh/world_group.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Bytes = std::vector<std::uint8_t>;

std::vector<int> peers_of(const std::vector<Send>& sends) {
  std::vector<int> peers;
  for (const Send& send : sends) peers.push_back(send.peer);
  return peers;
}

std::vector<std::size_t> sizes_of(const std::vector<Receive>& receives) {
  std::vector<std::size_t> sizes;
  for (const Receive& receive : receives) sizes.push_back(receive.bytes);
  return sizes;
}

TEST(MessageSplit, KeepsTheOrderOfEachPart) {
  const PeerReach reach{{0, 1, 0, 1}, "nodes"};
  const std::vector<Send> sends{{1, nullptr, 1}, {2, nullptr, 2}, {3, nullptr, 3}, {0, nullptr, 4}};
  const std::vector<Receive> receives{
      {2, nullptr, 5}, {2, nullptr, 6}, {1, nullptr, 7}, {0, nullptr, 8}};
  const SplitMessages split = split_messages(sends, receives, 0, reach);
  EXPECT_THAT(peers_of(split.inside.sends), ElementsAre(2, 0));
  EXPECT_THAT(peers_of(split.across.sends), ElementsAre(1, 3));
  EXPECT_THAT(sizes_of(split.inside.receives), ElementsAre(5, 6, 8));
  EXPECT_THAT(sizes_of(split.across.receives), ElementsAre(7));
}

TEST(MessageSplit, APartMayBeEmpty) {
  const PeerReach reach{{0, 0, 1}, "nodes"};
  const std::vector<Send> sends{{1, nullptr, 1}};
  const SplitMessages split = split_messages(sends, {}, 0, reach);
  EXPECT_THAT(peers_of(split.inside.sends), ElementsAre(1));
  EXPECT_TRUE(split.across.empty());
}

/// Passes everything on, and notes to whom something is sent.
class NotingGroup final : public Group {
 public:
  explicit NotingGroup(std::unique_ptr<Group> group)
      : Group(group->shared_control()), group_(std::move(group)) {}
  [[nodiscard]] Place place() const noexcept override { return group_->place(); }
  [[nodiscard]] const TransportTraits& traits() const noexcept override { return group_->traits(); }
  void exchange(std::span<const Send> sends, std::span<const Receive> receives, Stream& stream,
                ExchangeLabel label) override {
    for (const Send& send : sends) sent_to.push_back(send.peer);
    group_->exchange(sends, receives, stream, std::move(label));
  }
  void check() override {
    if (fails) throw LibraryError("noticed a failure");
  }
  void give_up() noexcept override { ++times_given_up; }

  std::vector<int> sent_to;
  bool fails = false;
  int times_given_up = 0;

 private:
  std::unique_ptr<Group> group_;
};

class CompositeGroup : public ::testing::Test {
 protected:
  // Pairs of ranks are cliques; the last one may be alone.
  CompositeGroup() {
    PeerReach reach;
    for (int rank = 0; rank < size_; ++rank) reach.clique_of_rank.push_back(clique_of(rank));
    auto inside = std::make_unique<NotingGroup>(test::make_world_group());
    auto across = std::make_unique<NotingGroup>(test::make_world_group());
    inside_ = inside.get();
    across_ = across.get();
    group_ = make_composite_group(*host_, std::move(reach), std::move(inside), std::move(across),
                                  test::kWatchdog);
  }

  static int clique_of(int rank) { return rank / 2; }
  static std::uint8_t value(int from, int to, int number) {
    return static_cast<std::uint8_t>(from * 71 + to * 13 + number);
  }

  /// Messages from everybody to everybody, two each.
  struct AllToAll {
    std::vector<Bytes> out, in;
    std::vector<Send> sends;
    std::vector<Receive> receives;
  };
  [[nodiscard]] AllToAll make_all_to_all() const {
    AllToAll all;
    for (int peer = 0; peer < size_; ++peer) {
      for (int number = 0; number < kEach; ++number) {
        all.out.emplace_back(bytes_of(rank_, peer, number));
        all.in.emplace_back(bytes_of(peer, rank_, number));
        all.sends.push_back({peer, all.out.back().data(), all.out.back().size()});
        all.receives.push_back({peer, all.in.back().data(), all.in.back().size()});
      }
    }
    return all;
  }
  void fill(AllToAll& all, int round) const {
    for (std::size_t i = 0; i < all.out.size(); ++i) {
      std::fill(all.out[i].begin(), all.out[i].end(),
                value(rank_, static_cast<int>(i) / kEach, static_cast<int>(i) % kEach + round));
    }
  }
  void expect_arrived(const AllToAll& all, int round) const {
    for (std::size_t i = 0; i < all.in.size(); ++i) {
      const int from = static_cast<int>(i) / kEach;
      EXPECT_EQ(all.in[i],
                Bytes(all.in[i].size(), value(from, rank_, static_cast<int>(i) % kEach + round)))
          << "from " << from << ", round " << round;
    }
  }

  static constexpr int kEach = 2;
  static std::size_t bytes_of(int from, int to, int number) {
    const int bytes = from * 300 + to * 7 + number * 10'000;
    return static_cast<std::size_t>(bytes);
  }

  const std::unique_ptr<Group> host_ = test::make_world_group();
  const int rank_ = host_->rank();
  const int size_ = host_->size();
  Bytes late_ = Bytes(4096);  // received into until the group ends
  NotingGroup* inside_ = nullptr;
  NotingGroup* across_ = nullptr;
  std::unique_ptr<Group> group_;
  HostStream stream_{"communication", test::kWatchdog, nullptr};
};

TEST_F(CompositeGroup, SaysWhatItIs) {
  EXPECT_EQ(group_->transport(), "composite");
  EXPECT_EQ(group_->rank(), rank_);
  EXPECT_EQ(group_->size(), size_);
  EXPECT_EQ(group_->place(), Place::host());
}

TEST_F(CompositeGroup, EachMessageGoesItsWay) {
  AllToAll all = make_all_to_all();
  fill(all, 0);
  group_->exchange(all.sends, all.receives, stream_, {"blocks", 0});
  stream_.synchronize();
  expect_arrived(all, 0);
  for (const auto& [part, inside] : {std::pair(inside_, true), std::pair(across_, false)}) {
    std::vector<int> expected;
    for (int peer = 0; peer < size_; ++peer) {
      if ((clique_of(peer) == clique_of(rank_)) == inside) expected.insert(expected.end(), 2, peer);
    }
    EXPECT_EQ(part->sent_to, expected);
  }
}

TEST_F(CompositeGroup, APreparedExchangeIsPostedOverAndOver) {
  AllToAll all = make_all_to_all();
  const auto exchange = group_->prepare(all.sends, all.receives, {"blocks", 0});
  for (int round = 0; round < 10; ++round) {
    fill(all, round);
    exchange->post(stream_);
    stream_.synchronize();
    expect_arrived(all, round);
  }
}

TEST_F(CompositeGroup, HopsOnAStreamRunInOrder) {
  // Every hop forwards what the one before it brought, now inside a clique, now out of it.
  const int next = (rank_ + 1) % size_;
  const int previous = (rank_ + size_ - 1) % size_;
  std::vector<Bytes> blocks{Bytes(5000, value(rank_, 0, 0))};
  std::vector<std::unique_ptr<PreparedExchange>> hops;
  for (int hop = 1; hop <= 3 * size_; ++hop) blocks.emplace_back(5000);
  for (std::size_t hop = 1; hop < blocks.size(); ++hop) {
    hops.push_back(group_->prepare({{next, blocks[hop - 1].data(), 5000}},
                                   {{previous, blocks[hop].data(), 5000}},
                                   {"key/value", static_cast<int>(hop)}));
  }
  for (const auto& hop : hops) hop->post(stream_);
  stream_.synchronize();
  for (int hop = 1; hop <= 3 * size_; ++hop) {
    EXPECT_EQ(blocks[static_cast<std::size_t>(hop)],
              Bytes(5000, value((rank_ + 3 * size_ - hop) % size_, 0, 0)));
  }
}

TEST_F(CompositeGroup, APartWithoutMessagesIsNotAsked) {
  Bytes out{1, 2, 3};
  Bytes in(3);
  group_->exchange({}, {}, stream_, {"nothing", 0});
  const auto exchange = group_->prepare({{rank_, out.data(), 3}}, {{rank_, in.data(), 3}}, {});
  exchange->post(stream_);
  stream_.synchronize();
  EXPECT_EQ(in, out);
  EXPECT_THAT(inside_->sent_to, ElementsAre(rank_));
  EXPECT_THAT(across_->sent_to, IsEmpty());
}

TEST_F(CompositeGroup, MessagesWithoutTheirCounterpartAreRefused) {
  Bytes data(3);
  EXPECT_THROW((void)group_->prepare({{size_, data.data(), 3}}, {}, {}), InternalError);
  EXPECT_THROW((void)group_->prepare({}, {{-1, data.data(), 3}}, {}), InternalError);
  EXPECT_THROW(test::send(*group_, {rank_, data.data(), 3}, stream_), InternalError);
}

TEST_F(CompositeGroup, AFailureOfEitherPartIsNoticedAndBothAreGivenUp) {
  EXPECT_NO_THROW(group_->check());
  for (NotingGroup* part : {inside_, across_}) {
    part->fails = true;
    EXPECT_THROW(group_->check(), LibraryError);
    part->fails = false;
  }
  group_->give_up();
  EXPECT_EQ(inside_->times_given_up, 1);
  EXPECT_EQ(across_->times_given_up, 1);
}

TEST_F(CompositeGroup, WhoDoesNotComeIsNamed) {
  if (size_ < 3) GTEST_SKIP() << "needs 3 ranks";
  // Rank 2 waits for rank 1, which is of another clique, beside a message that comes at once.
  const Watchdog hasty{Watchdog::Seconds(0.5)};
  HostStream impatient("hasty", hasty, nullptr);
  Bytes own(8);
  Bytes copy(8);
  if (rank_ == 2) {
    const auto exchange =
        group_->prepare({{2, own.data(), 8}},
                        {{2, copy.data(), 8}, {1, late_.data(), late_.size()}}, {"key/value", 3});
    EXPECT_THAT(test::message_of<TimeoutError>([&] {
                  exchange->post(impatient);
                  impatient.synchronize();
                }),
                HasSubstr("step 3: waiting for 4 KiB of key/value from rank 1"));
  }
  host_->control().barrier();
  if (rank_ == 1) {
    test::send(*group_, {2, late_.data(), late_.size()}, stream_, {"key/value", 3});
    stream_.synchronize();
  }
  host_->control().barrier();
}

}  // namespace
}  // namespace annulus
