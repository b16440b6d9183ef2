// Which calls are recorded: all that ranks do alike where the transport wants that, whatever memory
// their tensors lie in.
#include "runner/recordings.hpp"

#include <array>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

namespace annulus::ring {
namespace {

class FakeRecording final : public Recording {
 public:
  void submit(Stream& /*stream*/) override {}
};

// A call with tensors at this address.
class Calls {
 public:
  explicit Calls(bool uniform) : recordings(uniform) {}
  bool recorded(float& at) {
    const std::array tensors{TensorView(&at, DType::float32, {1})};
    return recordings.find(tensors, [&] {
      ++made;
      return std::make_unique<FakeRecording>();
    }) != nullptr;
  }
  Recordings recordings;
  int made = 0;
};

TEST(Recordings, WhatComesAgainIsRecorded) {
  Calls calls(false);
  std::vector<float> memory(3);
  for (float& at : memory) EXPECT_FALSE(calls.recorded(at));
  for (float& at : memory) EXPECT_TRUE(calls.recorded(at));
  for (float& at : memory) EXPECT_TRUE(calls.recorded(at));
  EXPECT_EQ(calls.made, 3);
}

// One rank's layers may take turns at two addresses while another's always use one.
TEST(Recordings, UniformCallsAreRecordedWhateverARankGivesThem) {
  std::vector<float> memory(7);
  Calls same(true);
  Calls changing(true);
  for (std::size_t call = 0; call < memory.size(); ++call) {
    EXPECT_EQ(same.recorded(memory[0]), call > 0);
    EXPECT_EQ(changing.recorded(memory[call]), call > 0);
  }
  EXPECT_EQ(same.made, 1);
  EXPECT_EQ(changing.made, 6);
}

// A rank that makes itself ready for other tensors, by itself, goes on like the others; where all
// begin anew, all do.
TEST(Recordings, ForgettingIsNotBeginningAnew) {
  std::vector<float> memory(2);
  Calls calls(true);
  EXPECT_FALSE(calls.recorded(memory[0]));
  EXPECT_TRUE(calls.recorded(memory[0]));
  calls.recordings.clear();
  EXPECT_TRUE(calls.recorded(memory[1]));
  calls.recordings.restart();
  EXPECT_FALSE(calls.recorded(memory[1]));
  EXPECT_TRUE(calls.recorded(memory[1]));
}

// 256 sets of tensors are kept. One more does not replace the sets that take turns.
TEST(Recordings, MoreSetsThanFitDoNotMakeEachOtherForgotten) {
  std::vector<float> memory(257);
  Calls calls(false);
  for (int round = 0; round < 8; ++round) {
    int recorded = 0;
    for (float& at : memory) recorded += calls.recorded(at) ? 1 : 0;
    EXPECT_EQ(recorded, round == 0 ? 0 : 256);
  }
  EXPECT_EQ(calls.made, 256);
}

// All uniform calls are recorded; a cycle of one set too many records two of them anew per round.
TEST(Recordings, UniformCallsOfMoreSetsThanFitAreNotAllRecordedAnew) {
  std::vector<float> memory(257);
  Calls calls(true);
  for (int round = 0; round < 2; ++round) {
    for (float& at : memory) (void)calls.recorded(at);
  }
  const int before = calls.made;
  for (float& at : memory) EXPECT_TRUE(calls.recorded(at));
  EXPECT_LE(calls.made - before, 2);
}

TEST(Recordings, SetsThatAreUsedNoMoreMakeRoom) {
  std::vector<float> memory(257);
  Calls calls(false);
  for (std::size_t i = 0; i < 256; ++i) (void)calls.recorded(memory[i]);
  for (int call = 0; call < 1100; ++call) EXPECT_EQ(calls.recorded(memory[1]), true);
  EXPECT_FALSE(calls.recorded(memory[256]));
  EXPECT_TRUE(calls.recorded(memory[256]));
  EXPECT_TRUE(calls.recorded(memory[1]));
  EXPECT_FALSE(calls.recorded(memory[0]));  // the one that went
}

}  // namespace
}  // namespace annulus::ring
