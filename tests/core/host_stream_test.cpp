#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/device.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/host_stream.hpp>

#include "tests/support/idle_stream.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Diary = std::vector<std::string>;

const Watchdog kPatient{Watchdog::Seconds(30)};
const Watchdog kHasty{Watchdog::Seconds(0.05)};
constexpr int kNever = -1;

// Finishes at its n-th test and notes when it starts and ends.
class FakeOperation final : public HostOperation {
 public:
  FakeOperation(std::string name, int polls, Diary& diary)
      : name_(std::move(name)), polls_(polls), diary_(diary) {}
  void start() override { diary_.push_back("start " + name_); }
  bool test() override {
    if (polls_ == kNever || --polls_ > 0) return false;
    diary_.push_back("end " + name_);
    return true;
  }
  [[nodiscard]] std::string describe() const override { return "waiting for " + name_; }
  [[nodiscard]] TraceLabel label() const override { return {TraceCategory::transfer, name_, 3}; }

 private:
  std::string name_;
  int polls_;
  Diary& diary_;
};

class HostStreamTest : public ::testing::Test {
 protected:
  void submit(HostStream& stream, const std::string& name, int polls) {
    stream.submit(std::make_unique<FakeOperation>(name, polls, diary_));
  }
  Diary diary_;
  HostStream a_{"a", kPatient, nullptr};
  HostStream b_{"b", kPatient, nullptr};
};

TEST_F(HostStreamTest, AnIdleStreamIsComplete) {
  EXPECT_TRUE(a_.record()->is_complete());
  a_.synchronize();
  EXPECT_EQ(a_.place(), Place::host());
  EXPECT_EQ(a_.name(), "a");
}

TEST_F(HostStreamTest, OperationsRunInOrder) {
  submit(a_, "1", 30);
  submit(a_, "2", 1);
  submit(a_, "3", 2);
  EXPECT_THAT(diary_, ElementsAre("start 1"));
  a_.synchronize();
  EXPECT_THAT(diary_, ElementsAre("start 1", "end 1", "start 2", "end 2", "start 3", "end 3"));
}

TEST_F(HostStreamTest, AnEventCoversWhatCameBeforeIt) {
  submit(a_, "1", 2);
  const auto first = a_.record();
  submit(a_, "2", 5);
  const auto second = a_.record();
  // The submissions polled twice: once each. The first operation is through, the second is not.
  EXPECT_TRUE(first->is_complete());
  EXPECT_FALSE(second->is_complete());
  a_.wait(second);
  a_.synchronize();
  EXPECT_TRUE(second->is_complete());
}

TEST_F(HostStreamTest, AnEventOutlivesItsStream) {
  auto stream = std::make_unique<HostStream>("short-lived", kPatient, nullptr);
  submit(*stream, "1", 4);
  const auto event = stream->record();
  stream.reset();
  b_.wait(event);
  EXPECT_TRUE(event->is_complete());
  EXPECT_THAT(diary_, ElementsAre("start 1", "end 1"));
}

TEST_F(HostStreamTest, AnEmptyStreamBlocksForTheEvent) {
  submit(a_, "1", 10);
  b_.wait(a_.record());
  EXPECT_THAT(diary_, ElementsAre("start 1", "end 1"));
}

TEST_F(HostStreamTest, AFullStreamQueuesTheWait) {
  submit(a_, "a1", 50);
  submit(b_, "b1", 2);
  b_.wait(a_.record());
  submit(b_, "b2", 1);
  EXPECT_THAT(diary_, ElementsAre("start a1", "start b1", "end b1"));
  b_.synchronize();
  EXPECT_THAT(diary_,
              ElementsAre("start a1", "start b1", "end b1", "end a1", "start b2", "end b2"));
  EXPECT_TRUE(a_.record()->is_complete());
}

TEST_F(HostStreamTest, StreamsThatWaitForEachOtherInTurnFinish) {
  submit(a_, "a1", 4);
  submit(b_, "b1", 4);
  const auto a1 = a_.record();
  const auto b1 = b_.record();
  a_.wait(b1);
  b_.wait(a1);
  submit(a_, "a2", 2);
  submit(b_, "b2", 2);
  b_.wait(a_.record());
  a_.synchronize();
  b_.synchronize();
  EXPECT_EQ(diary_.size(), 8U);
  EXPECT_TRUE(a_.record()->is_complete());
  EXPECT_TRUE(b_.record()->is_complete());
}

TEST_F(HostStreamTest, WaitingForOneselfIsHarmless) {
  submit(a_, "1", 5);
  a_.wait(a_.record());
  submit(a_, "2", 1);
  a_.synchronize();
  EXPECT_THAT(diary_, ElementsAre("start 1", "end 1", "start 2", "end 2"));
}

TEST_F(HostStreamTest, ProgressNeverBlocks) {
  submit(a_, "never", kNever);
  for (int i = 0; i < 10; ++i) a_.progress();
  EXPECT_THAT(diary_, ElementsAre("start never"));
}

TEST_F(HostStreamTest, ATimeoutNamesTheOperation) {
  HostStream hasty("hasty", kHasty, nullptr);
  submit(hasty, "never", kNever);
  EXPECT_THAT(test::message_of<TimeoutError>([&] { hasty.synchronize(); }),
              HasSubstr("waiting for never"));
  const auto event = hasty.record();
  HostStream other("other", kHasty, nullptr);
  EXPECT_THAT(test::message_of<TimeoutError>([&] { other.wait(event); }),
              HasSubstr("waiting for never"));
}

TEST_F(HostStreamTest, ATimeoutNamesTheOperationBehindAnotherStream) {
  HostStream hasty("hasty", kHasty, nullptr);
  submit(a_, "never", kNever);
  submit(hasty, "1", 3);
  hasty.wait(a_.record());
  submit(hasty, "2", 1);
  EXPECT_THAT(test::message_of<TimeoutError>([&] { hasty.synchronize(); }),
              HasSubstr("waiting for never"));
}

// Takes a fixed time.
class SlowOperation final : public HostOperation {
 public:
  explicit SlowOperation(std::chrono::milliseconds time) : time_(time) {}
  void start() override { begin_ = std::chrono::steady_clock::now(); }
  bool test() override { return std::chrono::steady_clock::now() - begin_ >= time_; }
  [[nodiscard]] std::string describe() const override { return "slow"; }
  [[nodiscard]] TraceLabel label() const override { return {}; }

 private:
  std::chrono::milliseconds time_;
  std::chrono::steady_clock::time_point begin_;
};

TEST_F(HostStreamTest, TheTimeoutBoundsEachOperationNotTheQueue) {
  const Watchdog watchdog{Watchdog::Seconds(0.5)};
  HostStream stream("stream", watchdog, nullptr);
  HostStream other("other", watchdog, nullptr);
  const auto submit_all = [&] {
    for (int i = 0; i < 4; ++i) {
      stream.submit(std::make_unique<SlowOperation>(std::chrono::milliseconds(200)));
    }
  };
  submit_all();
  EXPECT_NO_THROW(stream.synchronize());
  submit_all();
  EXPECT_NO_THROW(other.wait(stream.record()));
}

TEST_F(HostStreamTest, OperationsAreTraced) {
  TraceCollector collector;
  Tracer tracer;
  tracer.add_sink(collector);
  HostStream stream("communication", kPatient, &tracer);
  submit(stream, "hop", 3);
  stream.synchronize();
  ASSERT_EQ(collector.spans().size(), 1U);
  const TraceSpan& span = collector.spans().front();
  EXPECT_EQ(span.stream, "communication");
  EXPECT_EQ(span.label.category, TraceCategory::transfer);
  EXPECT_EQ(span.label.name, "hop");
  EXPECT_EQ(span.label.step, 3);
  EXPECT_GT(span.begin_ns, 0);
  EXPECT_GE(span.end_ns, span.begin_ns);
}

TEST_F(HostStreamTest, OnlyHostStreamsAreHostStreams) {
  EXPECT_EQ(&HostStream::of(a_), &a_);
  test::IdleStream other(Place::cuda(2), "compute");
  EXPECT_THAT(test::message_of<InternalError>([&] { (void)HostStream::of(other); }),
              HasSubstr("'compute' on cuda:2"));
}

TEST(HostDevice, MakesHostStreams) {
  HostDevice device;
  EXPECT_EQ(to_string(device.place()), "cpu");
  const auto stream = device.make_stream("compute", kPatient, nullptr);
  EXPECT_EQ(stream->name(), "compute");
  EXPECT_EQ(&HostStream::of(*stream), stream.get());
  EXPECT_EQ(device.memory().allocate(10).place(), Place::host());
}

}  // namespace
}  // namespace annulus
