#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "tests/mesh/world_group.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Bytes = std::vector<std::uint8_t>;

// The bytes of message `number` from rank `from` to rank `to`: no two messages look alike.
Bytes message(int from, int to, int number, std::size_t bytes) {
  Bytes data(bytes);
  auto state = static_cast<std::uint32_t>(from * 1000003 + to * 1009 + number * 31 + 1);
  for (std::uint8_t& byte : data) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::uint8_t>(state >> 24U);
  }
  return data;
}

// The data calls, with messages whole and in pieces of several sizes.
class GroupData : public ::testing::TestWithParam<std::size_t>, protected test::Ring {
 protected:
  GroupData() : Ring(test::make_world_group(test::kWatchdog, GetParam())) {}
};

TEST_P(GroupData, ExchangesManySizesWithEverybody) {
  const std::vector<std::size_t> sizes{0, 1, 6, 7, 8, 14, 100, 999, 1000, 1001, 5000};
  const auto size_of_message = [&](int from, int to, int number) {
    return sizes[static_cast<std::size_t>(from * 5 + to * 3 + number * 7) % sizes.size()];
  };
  constexpr int kMessages = 3;
  std::vector<Bytes> out;
  std::vector<Bytes> in;
  std::vector<Send> sends;
  std::vector<Receive> receives;
  for (int peer = 0; peer < size_; ++peer) {
    for (int number = 0; number < kMessages; ++number) {
      out.push_back(message(rank_, peer, number, size_of_message(rank_, peer, number)));
      sends.push_back({peer, out.back().data(), out.back().size()});
      in.emplace_back(size_of_message(peer, rank_, number), std::uint8_t{0});
      receives.push_back({peer, in.back().data(), in.back().size()});
    }
  }
  group_->exchange(sends, receives, stream_, {"test", 0});
  stream_.synchronize();
  for (int peer = 0; peer < size_; ++peer) {
    for (int number = 0; number < kMessages; ++number) {
      const auto& got = in[static_cast<std::size_t>(peer * kMessages + number)];
      EXPECT_EQ(got, message(peer, rank_, number, got.size())) << peer << " " << number;
    }
  }
}

TEST_P(GroupData, LargeMessagesRoundTheRing) {
  constexpr std::size_t kBytes = 300'001;
  if (GetParam() < 1000) GTEST_SKIP() << "too many pieces";
  const Bytes out = message(rank_, next_, 0, kBytes);
  Bytes in(kBytes);
  test::exchange(*group_, {next_, out.data(), kBytes}, {previous_, in.data(), kBytes}, stream_,
                 {"test", 0});
  stream_.synchronize();
  EXPECT_EQ(in, message(previous_, rank_, 0, kBytes));
}

TEST_P(GroupData, HopsOnAStreamRunInOrder) {
  // Two buffers in turn: each hop forwards what the one before it brought.
  std::vector<Bytes> blocks{message(rank_, 0, 0, 500)};
  for (int hop = 1; hop < size_; ++hop) blocks.emplace_back(500, std::uint8_t{0});
  std::vector<std::shared_ptr<Event>> arrived;
  for (int hop = 1; hop < size_; ++hop) {
    const auto h = static_cast<std::size_t>(hop);
    test::exchange(*group_, {next_, blocks[h - 1].data(), 500}, {previous_, blocks[h].data(), 500},
                   stream_, {"key/value", hop});
    arrived.push_back(stream_.record());
  }
  HostStream compute("compute", test::kWatchdog, nullptr);
  for (int hop = 1; hop < size_; ++hop) {
    compute.wait(arrived[static_cast<std::size_t>(hop) - 1]);
    EXPECT_EQ(blocks[static_cast<std::size_t>(hop)],
              message((rank_ + size_ - hop) % size_, 0, 0, 500));
  }
  stream_.synchronize();
}

INSTANTIATE_TEST_SUITE_P(ChunkBytes, GroupData, ::testing::Values(7, 1000, kMpiChunkBytes));

class GroupTest : public ::testing::Test, protected test::Ring {
 protected:
  GroupTest() : Ring(test::make_world_group()) {}

  // One of each rank.
  void expect_texts(const std::vector<std::string>& texts,
                    const std::function<std::string(int)>& text_of) const {
    ASSERT_EQ(texts.size(), static_cast<std::size_t>(size_));
    for (int peer = 0; peer < size_; ++peer) {
      EXPECT_EQ(texts[static_cast<std::size_t>(peer)], text_of(peer));
    }
  }
};

TEST_F(GroupTest, KnowsItself) {
  EXPECT_EQ(rank_, test::rank());
  EXPECT_EQ(size_, test::size());
  EXPECT_EQ(group_->place(), Place::host());
  const char* const without_store = test::session().world() == MPI_COMM_NULL ? "self" : "mpi";
  EXPECT_EQ(group_->transport(), test::store() ? "store" : without_store);
}

TEST_F(GroupTest, AnEmptyExchangeIsDone) {
  group_->exchange({}, {}, stream_, {});
  EXPECT_TRUE(stream_.record()->is_complete());
}

TEST_F(GroupTest, ExchangeReturnsAtOnce) {
  // Everybody posts the receive long before the matching send: nobody may block in between.
  if (size_ == 1) GTEST_SKIP() << "needs 2 ranks";
  HostStream sending("sending", test::kWatchdog, nullptr);
  const int out = rank_;
  int in = -1;
  test::receive(*group_, {previous_, &in, sizeof(in)}, stream_);
  group_->control().barrier();
  EXPECT_FALSE(stream_.record()->is_complete());
  group_->control().barrier();
  test::send(*group_, {next_, &out, sizeof(out)}, sending);
  stream_.synchronize();
  sending.synchronize();
  EXPECT_EQ(in, previous_);
}

TEST_F(GroupTest, TracesEveryMessage) {
  TraceCollector collector;
  Tracer tracer;
  tracer.add_sink(collector);
  HostStream stream("communication", test::kWatchdog, &tracer);
  const Bytes out(100);
  Bytes in(100);
  const std::int64_t before = monotonic_ns();
  test::exchange(*group_, {next_, out.data(), 100}, {previous_, in.data(), 100}, stream,
                 {"key/value", 4});
  stream.synchronize();
  std::vector<TraceMessage> messages;
  for (const TraceSpan& span : collector.spans()) {
    EXPECT_EQ(span.label.category, TraceCategory::transfer);
    EXPECT_EQ(span.label.name, "key/value");
    EXPECT_EQ(span.label.step, 4);
    EXPECT_EQ(span.stream, "communication");
    EXPECT_LE(before, span.begin_ns);
    EXPECT_LE(span.begin_ns, span.end_ns);
    messages.insert(messages.end(), span.label.messages.begin(), span.label.messages.end());
  }
  if (group_->transport() == "self") {
    EXPECT_EQ(collector.spans().size(), 1U);
    EXPECT_THAT(messages, ::testing::IsEmpty());
  } else if (size_ > 1) {
    EXPECT_THAT(messages, ::testing::ElementsAre(TraceMessage{previous_, 100, true},
                                                 TraceMessage{next_, 100, false}));
  }
}

// A message that came early must not seem to have taken as long as the rest.
TEST_F(GroupTest, AMessageEndsWhenItIsComplete) {
  if (size_ < 3) GTEST_SKIP() << "needs 3 ranks";
  TraceCollector collector;
  Tracer tracer;
  tracer.add_sink(collector);
  HostStream stream("communication", test::kWatchdog, &tracer);
  constexpr std::chrono::milliseconds kLate{200};
  Bytes from_next(10);
  Bytes from_previous(10);
  const Bytes out(10);
  group_->control().barrier();
  if (rank_ == 1) std::this_thread::sleep_for(kLate);
  const std::vector<Send> sends{{next_, out.data(), 10}, {previous_, out.data(), 10}};
  const std::vector<Receive> receives{{next_, from_next.data(), 10},
                                      {previous_, from_previous.data(), 10}};
  group_->exchange(sends, receives, stream, {"data", 0});
  stream.synchronize();
  if (rank_ != 0) return;
  ASSERT_EQ(collector.spans().size(), 4U);
  for (const TraceSpan& span : collector.spans()) {
    const TraceMessage& noted = span.label.messages.at(0);
    if (!noted.incoming) continue;
    const auto took = std::chrono::nanoseconds(span.end_ns - span.begin_ns);
    if (noted.peer == 1) {
      EXPECT_GT(took, kLate / 2);
    } else {
      EXPECT_LT(took, kLate / 2);
    }
  }
}

TEST_F(GroupTest, RefusesMessagesThatCannotMatch) {
  int value = 0;
  const auto text_of = [&](std::vector<Send> sends, std::vector<Receive> receives) {
    return test::message_of<InternalError>([&] { group_->exchange(sends, receives, stream_, {}); });
  };
  EXPECT_THAT(text_of({{size_, &value, 4}}, {}), HasSubstr("rank " + std::to_string(size_)));
  EXPECT_THAT(text_of({}, {{-1, &value, 4}}), HasSubstr("rank -1"));
  EXPECT_THAT(text_of({{rank_, &value, 4}}, {}), HasSubstr("without the counterpart"));
  EXPECT_THAT(text_of({}, {{rank_, &value, 4}}), HasSubstr("without the counterpart"));
  EXPECT_THAT(text_of({{rank_, &value, 4}}, {{rank_, &value, 3}}), HasSubstr("4 bytes"));
  stream_.synchronize();
}

TEST_F(GroupTest, AMessageOfTheWrongLengthIsAnError) {
  if (size_ == 1) GTEST_SKIP() << "needs 2 ranks";
  for (const std::size_t expected : {std::size_t{20}, std::size_t{5}}) {
    // A group of its own: after an error it is not used again.
    const auto group = test::make_world_group();
    HostStream stream("communication", test::kWatchdog, nullptr);
    Bytes data(20);
    const std::string text = test::message_of<LibraryError>([&] {
      if (rank_ == 0) {
        test::send(*group, {1, data.data(), 10}, stream, {"key/value", 1});
      } else if (rank_ == 1) {
        test::receive(*group, {0, data.data(), expected}, stream, {"key/value", 1});
      }
      stream.synchronize();
    });
    if (rank_ == 1) {
      EXPECT_THAT(text, HasSubstr("key/value"));
      EXPECT_THAT(text, HasSubstr("rank 0"));
      EXPECT_THAT(text, HasSubstr(std::to_string(expected)));
    } else {
      EXPECT_EQ(text, "nothing thrown");
    }
    group_->control().barrier();
  }
}

TEST_F(GroupTest, GathersTextsOfDifferentLengths) {
  const auto text_of = [](int rank, int round) {
    return std::string(static_cast<std::size_t>(rank * round * 37), static_cast<char>('a' + rank));
  };
  for (int round = 0; round < 5; ++round) {
    const auto texts = group_->control().gather_text(text_of(rank_, round));
    expect_texts(texts, [&](int peer) { return text_of(peer, round); });
  }
  const std::string binary("a\0b", 3);
  EXPECT_EQ(group_->control().gather_text(binary).back(), binary);
}

TEST_F(GroupTest, CollectsTextsOnRankZeroOnly) {
  // Long enough to travel in pieces, one of them empty.
  const auto text_of = [](int rank) {
    return std::string(static_cast<std::size_t>(rank) * 3000, static_cast<char>('a' + rank));
  };
  for (int round = 0; round < 3; ++round) {
    const auto texts = group_->control().collect_text(text_of(rank_), "texts");
    if (rank_ != 0) {
      EXPECT_TRUE(texts.empty());
      continue;
    }
    expect_texts(texts, text_of);
  }
}

TEST_F(GroupTest, LongTextsTravelInPieces) {
  const auto group = test::make_world_group(test::kWatchdog, 1000);
  const auto text_of = [](int rank) {
    const Bytes bytes = message(rank, 0, 5, 4090 + 1503 * static_cast<std::size_t>(rank));
    return std::string(bytes.begin(), bytes.end());
  };
  const auto texts = group->control().gather_text(text_of(rank_));
  expect_texts(texts, text_of);
}

TEST_F(GroupTest, SumsHaveTheSameBitsEverywhereAndEveryTime) {
  const auto value = [](int rank, std::size_t k) {
    return (rank % 2 == 0 ? 1e16 : -1e16) + 0.1 * (rank + 1) + static_cast<double>(k);
  };
  std::vector<double> mine;
  for (std::size_t k = 0; k < 5; ++k) mine.push_back(value(rank_, k));
  // Neighbours first, then pairs of them, and so on: the order that the ranks' number gives.
  const std::function<double(int, int, std::size_t)> tree = [&](int begin, int width,
                                                                std::size_t k) {
    double total = value(begin, k);
    for (int step = 1; step < width && begin + step < size_; step <<= 1) {
      total += tree(begin + step, step, k);
    }
    return total;
  };
  std::string first_bits;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const std::vector<double> sums = group_->control().sum(mine);
    ASSERT_EQ(sums.size(), 5U);
    std::string bits;
    for (std::size_t k = 0; k < 5; ++k) {
      EXPECT_EQ(std::bit_cast<std::uint64_t>(sums[k]),
                std::bit_cast<std::uint64_t>(tree(0, size_, k)));
      bits += std::to_string(std::bit_cast<std::uint64_t>(sums[k])) + " ";
    }
    for (const std::string& theirs : group_->control().gather_text(bits)) EXPECT_EQ(theirs, bits);
    if (repeat == 0) first_bits = bits;
    EXPECT_EQ(bits, first_bits);
  }
  EXPECT_TRUE(group_->control().sum({}).empty());
}

TEST_F(GroupTest, MaximumPropagatesNan) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> mine{static_cast<double>(rank_), static_cast<double>(-rank_),
                                 rank_ == size_ - 1 ? kNan : 5.0, rank_ == 0 ? kNan : 5.0,
                                 -std::numeric_limits<double>::infinity()};
  const std::vector<double> maxima = group_->control().max(mine);
  ASSERT_EQ(maxima.size(), 5U);
  EXPECT_EQ(maxima[0], size_ - 1);
  EXPECT_EQ(maxima[1], 0.0);
  EXPECT_TRUE(std::isnan(maxima[2]));
  EXPECT_TRUE(std::isnan(maxima[3]));
  EXPECT_EQ(maxima[4], -std::numeric_limits<double>::infinity());
}

TEST_F(GroupTest, UnequalCountsAreAnError) {
  if (size_ == 1) GTEST_SKIP() << "needs 2 ranks";
  const std::vector<double> values(rank_ == 0 ? 2 : 1, 1.0);
  EXPECT_THROW((void)group_->control().sum(values), InternalError);
}

TEST_F(GroupTest, DifferentCallsAreAnErrorOfEveryRank) {
  if (size_ == 1) GTEST_SKIP() << "needs 2 ranks";
  EXPECT_THAT(test::message_of<InternalError>([&] {
                if (rank_ == size_ - 1) {
                  (void)group_->control().max(std::vector{1.0});
                } else {
                  (void)group_->control().sum(std::vector{1.0});
                }
              }),
              HasSubstr("rank " + std::to_string(size_ - 1)));
}

TEST_F(GroupTest, CallsForDifferentPurposesAreAnErrorOfEveryRank) {
  if (size_ == 1) GTEST_SKIP() << "needs 2 ranks";
  const char* what = rank_ == size_ - 1 ? "cores of the ranks" : "agreement on errors";
  EXPECT_THAT(
      test::message_of<InternalError>([&] { (void)group_->control().gather_text("1", what); }),
      AllOf(HasSubstr("rank " + std::to_string(size_ - 1)), HasSubstr("cores of the ranks"),
            HasSubstr("agreement")));
}

TEST_F(GroupTest, ARankThatIsACallAheadIsAnErrorOfEveryRank) {
  if (size_ == 1) GTEST_SKIP() << "needs 2 ranks";
  const std::string last = "rank " + std::to_string(size_ - 1);
  // Not freed: MPI could give its identity, and with it a part that nobody takes, to the next one.
  static const std::shared_ptr<Control> control = test::make_world_group()->shared_control();
  if (rank_ == size_ - 1) (void)control->collect_text("unasked", "texts");
  EXPECT_THAT(test::message_of<InternalError>([&] { (void)control->gather_text("1"); }),
              HasSubstr(last + " is in another call"));
}

TEST_F(GroupTest, ControlCallsAndDataDoNotMix) {
  // Data is on its way while control calls run.
  const std::uint64_t out = 1000U + static_cast<unsigned>(rank_);
  std::uint64_t in = 0;
  test::exchange(*group_, {next_, &out, sizeof(out)}, {previous_, &in, sizeof(in)}, stream_);
  group_->control().barrier();
  const auto texts = group_->control().gather_text(std::to_string(rank_));
  EXPECT_EQ(texts[static_cast<std::size_t>(next_)], std::to_string(next_));
  stream_.synchronize();
  EXPECT_EQ(in, 1000U + static_cast<unsigned>(previous_));
}

TEST_F(GroupTest, AbortEndsTheProcessWithItsCode) {
  if (test::session().world() != MPI_COMM_NULL || size_ > 1) {
    GTEST_SKIP() << "would end every rank";
  }
  EXPECT_EXIT(group_->control().abort(3), ::testing::ExitedWithCode(3), "");
}

TEST_F(GroupTest, ChunkSizesAreChecked) {
  if (test::session().world() == MPI_COMM_NULL) GTEST_SKIP() << "no MPI";
  EXPECT_THROW((void)test::make_world_group(test::kWatchdog, 0), ArgumentError);
  EXPECT_THROW((void)test::make_world_group(test::kWatchdog, std::size_t{1} << 31), ArgumentError);
}

}  // namespace
}  // namespace annulus
