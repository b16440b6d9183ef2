// The arguments of calls on their way to the kernels of a device, with host memory in its place.
#include "runner/call_arrays.hpp"

#include <cstdint>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/host_stream.hpp>

#include "tests/ring/runner/no_operations.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/pretended_device.hpp"
#include "tests/support/test_world.hpp"

namespace annulus::ring {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

using Numbers = std::vector<std::int32_t>;

// Does at once what a GPU does in the order of the stream.
class Writing final : public NoOperations {
 public:
  void write(const CallArgumentWrite& write, Stream& /*stream*/) const override {
    write.write_key();
    for (int batch = 0; batch < write.batches; ++batch) {
      write.write(write.query_lengths, batch);
      write.write(write.kv_lengths, batch);
      write.write(write.offsets, batch);
    }
  }
};

class CallArraysTest : public ::testing::Test {
 protected:
  static AttentionProblem problem(std::int64_t batch) {
    AttentionProblem problem;
    problem.shape = {batch, 37, 50, 1, 1, 8, 8};
    problem.mask.set_causal(true);
    problem.mask.set_offset(3);
    problem.dropout.emplace(0.3, 5);
    problem.call_arguments = {true, true, true};
    return problem;
  }
  [[nodiscard]] CallArrays make(const AttentionProblem& planned, BatchRange batches) {
    return {planned, batches, device_, stream_};
  }
  void write(const CallArrays& arrays, const AttentionProblem& called,
             const CallValues& values = {}) {
    arrays.write(called, values, operations_, stream_);
  }
  static ConstTensorView on_device(const Numbers& numbers) {
    return {numbers.data(), DType::int32, {std::ssize(numbers)}, Place::cuda(0)};
  }
  static Numbers of(const std::int32_t* numbers, BatchRange batches) {
    return {numbers + batches.begin, numbers + batches.end()};
  }

  test::PretendedDevice device_{Place::cuda(0)};
  HostStream stream_{"compute", test::kWatchdog, nullptr};
  Writing operations_;
};

TEST_F(CallArraysTest, HoldTheNumbersOfTheProblem) {
  const BatchRange batches{0, 3};
  AttentionProblem called = problem(3);
  const CallArrays arrays = make(called, batches);
  write(arrays, called);
  const CallArgumentArrays& found = arrays.arrays();
  EXPECT_THAT(of(found.query_lengths, batches), Each(37));
  EXPECT_THAT(of(found.kv_lengths, batches), Each(50));
  EXPECT_THAT(of(found.offsets, batches), Each(3));
  called.mask.set_query_lengths({1, 2, 37});
  called.mask.set_kv_lengths({0, 50, 4});
  called.mask.set_offsets({-7, 2147483647, -2147483647});
  called.dropout.emplace(0.3, 0xfeedfacecafebeefU);
  write(arrays, called);
  EXPECT_THAT(of(found.query_lengths, batches), ElementsAre(1, 2, 37));
  EXPECT_THAT(of(found.kv_lengths, batches), ElementsAre(0, 50, 4));
  EXPECT_THAT(of(found.offsets, batches), ElementsAre(-7, 2147483647, -2147483647));
  EXPECT_EQ(found.dropout_key[0], 0xcafebeefU);
  EXPECT_EQ(found.dropout_key[1], 0xfeedfaceU);
  EXPECT_NO_THROW(arrays.check());
}

TEST_F(CallArraysTest, ReadTheMemoryOfTheDevice) {
  const BatchRange batches{1, 2};  // of the rank
  const AttentionProblem planned = problem(4);
  const CallArrays arrays = make(planned, batches);
  const Numbers lengths{9, 50};
  const Numbers every_other{4, 0, 6, 0};
  const Numbers one{11};
  const std::uint64_t seed = (std::uint64_t{7} << 32U) + 1;
  CallValues values{on_device(one), on_device(lengths),
                    ConstTensorView(every_other.data(), DType::int32, {2}, {2}, Place::cuda(0))};
  values.device_dropout_seed = &seed;
  write(arrays, planned, values);
  const CallArgumentArrays& found = arrays.arrays();
  EXPECT_THAT(of(found.query_lengths, batches), Each(11));
  EXPECT_THAT(of(found.kv_lengths, batches), ElementsAre(9, 50));
  EXPECT_THAT(of(found.offsets, batches), ElementsAre(4, 6));
  EXPECT_EQ(found.dropout_key[0], 1U);
  EXPECT_EQ(found.dropout_key[1], 7U);
  EXPECT_NO_THROW(arrays.check());
}

TEST_F(CallArraysTest, BoundWhatTheyReadAndTellOnce) {
  const BatchRange batches{1, 3};
  AttentionProblem planned = problem(4);
  planned.mask.set_kv_lengths({50, 50, 20, 30});
  const CallArrays arrays = make(planned, batches);
  const auto message = [&](const Numbers& query, const Numbers& kv) {
    write(arrays, planned, {on_device(query), on_device(kv)});
    return test::message_of<ArgumentError>([&] { arrays.check(); });
  };
  EXPECT_EQ(message({37}, {50, 21, 30}),
            "kv_lengths: got 21 in batch 2, expected 0 to 20, as planned");
  EXPECT_THAT(of(arrays.arrays().kv_lengths, batches), ElementsAre(50, 20, 30));
  EXPECT_NO_THROW(arrays.check());
  EXPECT_EQ(message({38}, {1, 2, 3}).substr(0, 20), "q_lengths: got 38 in");
  EXPECT_EQ(message({5, 6, 7}, {1, 2, -2147483647}),
            "kv_lengths: got -2147483647 in batch 3, expected 0 to 30, as planned");
  EXPECT_THAT(of(arrays.arrays().query_lengths, batches), ElementsAre(5, 6, 7));
  EXPECT_THAT(of(arrays.arrays().kv_lengths, batches), ElementsAre(1, 2, 0));
}

TEST_F(CallArraysTest, OfMoreBatchesThanOneWriteTakes) {
  const BatchRange batches{10, 600};
  AttentionProblem called = problem(700);
  const CallArrays arrays = make(called, batches);
  Numbers offsets, lengths;
  for (std::int32_t b = 0; b < 700; ++b) offsets.push_back(b - 350);
  for (std::int32_t b = 0; b < 600; ++b) lengths.push_back(b % 38);
  called.mask.set_offsets(offsets);
  write(arrays, called, {on_device(lengths)});
  EXPECT_EQ(of(arrays.arrays().offsets, batches),
            Numbers(offsets.begin() + 10, offsets.begin() + 610));
  EXPECT_EQ(of(arrays.arrays().query_lengths, batches), lengths);
  lengths[599] = 38;
  write(arrays, called, {on_device(lengths)});
  EXPECT_THAT(test::message_of<ArgumentError>([&] { arrays.check(); }),
              ::testing::HasSubstr("got 38 in batch 609"));
}

TEST_F(CallArraysTest, OfProblemsWithoutThemAreNone) {
  AttentionProblem planned = problem(2);
  planned.call_arguments = {.offsets = true};
  EXPECT_EQ(make(planned, {0, 2}).arrays().kv_lengths, nullptr);
  EXPECT_EQ(make(planned, {0, 2}).arrays().dropout_key, nullptr);
  EXPECT_NE(make(planned, {0, 2}).arrays().offsets, nullptr);
  planned.call_arguments = {};
  const CallArrays none = make(planned, {0, 2});
  EXPECT_EQ(none.arrays().offsets, nullptr);
  EXPECT_NO_THROW(write(none, planned));
  EXPECT_EQ(device_.memory().statistics().in_use, 0U);
}

}  // namespace
}  // namespace annulus::ring
