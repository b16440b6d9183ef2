#include <gtest/gtest.h>

#include <annulus/core/awaiting_calls.hpp>

#include "tests/support/pretended_device.hpp"

namespace annulus {
namespace {

// Two contexts open the same GPU twice. Their calls that wait for other ranks must still take
// turns.
TEST(AwaitingCalls, AreOnesOfTheGpuNotOfTheDeviceObject) {
  test::PretendedDevice first(Place::cuda(0));
  test::PretendedDevice second(Place::cuda(0));
  test::PretendedDevice other(Place::cuda(1));
  EXPECT_EQ(&first.awaiting_calls(), &second.awaiting_calls());
  EXPECT_NE(&first.awaiting_calls(), &other.awaiting_calls());
  const auto stream = first.make_stream("compute", Watchdog(Watchdog::kDefault), nullptr);
  first.awaiting_calls().last = stream->record();
  EXPECT_EQ(second.awaiting_calls().last, first.awaiting_calls().last);
  EXPECT_EQ(other.awaiting_calls().last, nullptr);
}

}  // namespace
}  // namespace annulus
