#include "runner/sink_states.hpp"

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/device.hpp>

#include "tests/ring/runner/no_operations.hpp"

namespace annulus::ring {
namespace {

/// Operations of the host that a graph can hold back and repeat, as a device's are captured.
class HeldOperations final : public NoOperations {
 public:
  void hold(bool held) { held_ = held; }
  void launch() const {
    for (const auto& operation : graph_) operation();
  }

  void sink_state(const ConstTensorView& sinks, const TensorView& logits, const TensorView& lse,
                  const TensorView& maximum, Stream& stream) const override {
    const auto run = [=, this, &stream] { host_->sink_state(sinks, logits, lse, maximum, stream); };
    if (held_) {
      graph_.emplace_back(run);
    } else {
      run();
    }
  }

 private:
  std::unique_ptr<LocalOperations> host_ = make_local_operations(Place::host());
  bool held_ = false;
  mutable std::vector<std::function<void()>> graph_;
};

class SinkStatesTest : public ::testing::Test {
 protected:
  SinkStatesTest() {
    problem_.shape = {1, 4, 4, 1, 1, 8, 8};
    problem_.sinks = Sinks({1, 1}, {1.0F});
    plan_.local = problem_.shape;
    states_ = std::make_unique<SinkStates>(problem_, plan_, device_, operations_, *stream_);
  }
  // A call with this sink, or with the problem's own.
  void call(const float* sink, bool captured) {
    const ConstTensorView called =
        sink == nullptr ? ConstTensorView() : ConstTensorView(sink, DType::float32, {1, 1});
    operations_.hold(captured);
    states_->set(called, captured, operations_, *stream_);
    operations_.hold(false);
  }
  float logit() { return states_->logits().at<float>({0, 0}); }

  HostDevice device_;
  std::unique_ptr<Stream> stream_ =
      device_.make_stream("compute", Watchdog(Watchdog::Seconds(5)), nullptr);
  AttentionProblem problem_;
  RankPlan plan_;
  HeldOperations operations_;
  std::unique_ptr<SinkStates> states_;
};

// A launch happens without our knowledge.
TEST_F(SinkStatesTest, ACallAfterAGraphWithOtherSinksUsesItsOwn) {
  const float other = 5;
  call(&other, true);
  call(nullptr, false);
  EXPECT_EQ(logit(), 1);
  operations_.launch();
  EXPECT_EQ(logit(), 5);
  call(nullptr, false);
  EXPECT_EQ(logit(), 1);
}

TEST_F(SinkStatesTest, ASinkThatIsNotANumberStaysOne) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  call(&nan, false);
  const PartialState part = states_->part({0, 1}, {1, 1, 1, 8}, DType::float32);
  EXPECT_TRUE(std::isnan(part.state.lse.at<double>({0, 0, 0})));
}

}  // namespace
}  // namespace annulus::ring
