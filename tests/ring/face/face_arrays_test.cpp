// Calls of the public interface on sharded arrays, and the choice of a layout, on CPU ranks.
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/control.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/recommend.hpp>

#include "tests/ring/face/face_cases.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using FaceLayout = Face;

using ::testing::HasSubstr;

// Rows by rank, of which each holds its number; zigzag, or in columns.
class FaceArrays : public ::testing::Test {
 protected:
  static constexpr std::int64_t kRows = 37;
  static constexpr std::int64_t kColumns = 8;

  [[nodiscard]] NamedSharding sharding(const char* spec, Distribution rows = {}) const {
    return {context_.mesh_shape(), PartitionSpec::parse(spec), {kRows, kColumns}, {rows}};
  }
  [[nodiscard]] static float number(std::int64_t row, std::int64_t column) {
    return static_cast<float>(row * kColumns + column);
  }
  // Calls `visit` with the local indices and the number of each element of this rank's shard.
  template <class Visit>
  void for_each_element(const NamedSharding& sharding, const Visit& visit) const {
    const PositionRanges rows = sharding.positions(context_.rank(), 0);
    const PositionRanges columns = sharding.positions(context_.rank(), 1);
    for (std::int64_t i = 0; i < rows.size(); ++i) {
      for (std::int64_t j = 0; j < columns.size(); ++j) {
        visit(i, j,
              number(rows.global(LocalPosition(i)).value(),
                     columns.global(LocalPosition(j)).value()));
      }
    }
  }
  [[nodiscard]] ShardedTensor numbers(const NamedSharding& sharding) {
    ShardedTensor array(sharding, context_.rank(), DType::float32, context_.memory());
    for_each_element(sharding, [&](auto i, auto j, float number) {
      array.local().at<float>({i, j}) = number;
    });
    return array;
  }
  [[nodiscard]] std::vector<Tensor> doubled(const ConstTensorView& shard) {
    std::vector<Tensor> results;
    results.emplace_back(DType::float32, shard.shape(), context_.memory());
    for (std::int64_t i = 0; i < shard.size(0); ++i) {
      for (std::int64_t j = 0; j < shard.size(1); ++j) {
        results[0].view().at<float>({i, j}) = 2 * shard.at<float>({i, j});
      }
    }
    return results;
  }
  // Every element is `factor` times its number.
  void expect_multiples(const NamedSharding& sharding, const ConstTensorView& shard, float factor) {
    ASSERT_EQ(shard.shape(), sharding.local_shape(context_.rank()));
    for_each_element(sharding, [&](auto i, auto j, float number) {
      ASSERT_EQ(shard.at<float>({i, j}), factor * number) << i << ", " << j;
    });
  }

  Context context_{world(), on_host()};
};

TEST_F(FaceArrays, AreMovedAndMapped) {
  const NamedSharding zigzag = sharding("sp,-", Distribution::sequence(LayoutKind::zigzag));
  const NamedSharding columns = sharding("-,sp");
  const ShardedTensor array = numbers(zigzag);
  // By columns inside the body, so that the argument moves first.
  const ShardMap doubling{.body = [&](auto shards) { return doubled(shards[0]); },
                          .in_specs = {PartitionSpec::parse("-,sp")},
                          .out_specs = {PartitionSpec::parse("-,sp")}};
  const std::vector<ShardedTensor> results = shard_map(context_, doubling, {array});
  ASSERT_EQ(results.size(), 1U);
  expect_multiples(columns, results[0].local(), 2);

  ShardedTensor moved(zigzag, context_.rank(), DType::float32, context_.memory());
  reshard(context_, columns, results[0].local(), zigzag, moved.local());
  expect_multiples(zigzag, moved.local(), 2);
}

TEST_F(FaceArrays, ErrorsOfOneRankAreThrownOnAll) {
  const NamedSharding columns = sharding("-,sp");
  const ShardedTensor array = numbers(columns);
  for (const int odd : {0, context_.size() - 1}) {
    SCOPED_TRACE(odd);
    const bool mine = context_.rank() == odd;
    const ShardMap failing{.body =
                               [&](auto shards) {
                                 if (mine) throw ArgumentError("body", "a fault", "none");
                                 return doubled(shards[0]);
                               },
                           .in_specs = {PartitionSpec()},
                           .out_specs = {PartitionSpec()}};
    EXPECT_THAT(test::message_of<UserError>([&] { (void)shard_map(context_, failing, {array}); }),
                HasSubstr("body: got a fault, expected none"));
    const Tensor wrong(DType::float32, {kRows + 1, kColumns}, context_.memory());
    ShardedTensor right(columns, context_.rank(), DType::float32, context_.memory());
    EXPECT_THAT(test::message_of<UserError>([&] {
                  reshard(context_, columns, array.local(), columns,
                          mine ? wrong.view() : right.local());
                }),
                HasSubstr("destination"));
    // The ranks can still communicate.
    reshard(context_, columns, array.local(), columns, right.local());
    expect_multiples(columns, right.local(), 1);
  }
}

// A layout may be better than the default under a narrow window.
TEST_F(FaceLayout, AllRanksGetTheChoiceOfRank0) {
  AttentionOptions options = causal(4096);
  options.mask.set_window(100, 0);
  const ring::LayoutChoice choice = ring::choose_layout(options, context_);
  EXPECT_FALSE(choice.why.empty());
  const std::string text = std::string(name_of(choice.layout)) + " " + choice.why;
  EXPECT_FALSE(context_.mesh().world().first_difference(text, "layout of this test").has_value());
  AttentionOptions named = options;
  named.schedule = context_.size() == 1 ? "local" : "ulysses";
  const std::string why_named = ring::choose_layout(named, context_).why;
  if (context_.size() > 2) {
    EXPECT_NE(why_named, choice.why);
  }
  const Overlay overlay(context_, {.schedule = named.schedule});
  EXPECT_EQ(ring::choose_layout(options, context_).why, why_named);
  options.layout = LayoutKind::striped;
  EXPECT_EQ(ring::choose_layout(options, context_).layout, LayoutKind::striped);
}

TEST_F(FaceLayout, AllRanksThrowWhatRank0Throws) {
  AttentionOptions options = causal(4096);
  options.mask.set_window(100, 0);
  AttentionOptions wrong = options;
  wrong.query_spec = PartitionSpec::parse("-,nowhere");
  for (const bool everywhere : {true, false}) {
    SCOPED_TRACE(everywhere);
    const AttentionOptions& mine = everywhere || context_.rank() == 0 ? wrong : options;
    const std::string text =
        test::message_of<UserError>([&] { (void)ring::choose_layout(mine, context_); });
    EXPECT_THAT(text, HasSubstr("nowhere"));
    EXPECT_FALSE(
        context_.mesh().world().first_difference(text, "message of this test").has_value());
  }
  EXPECT_NO_THROW((void)ring::choose_layout(options, context_));
}

}  // namespace
}  // namespace annulus
