#include <cstddef>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/sharding_rules.hpp>

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

const MeshShape kFullMesh({{"dp", 2}, {"fsdp", 1}, {"ep", 1}, {"tp", 2}, {"sp", 4}});
constexpr AttentionMode kTrain = AttentionMode::train;
constexpr AttentionMode kDecode = AttentionMode::autoregressive;

TEST(ShardingRules, DefaultsNameOnlyAxesOfTheMesh) {
  const ShardingRules rules = ShardingRules().for_mesh(MeshShape({{"sp", 4}}));
  EXPECT_EQ(to_string(rules.query_spec(kTrain)), "-,sp,-,-");
  EXPECT_EQ(to_string(rules.bias_spec(kTrain, {2, 8, 16, 16})), "-,-,sp,-");
  const ShardingRules data = ShardingRules().for_mesh(MeshShape({{"dp", 4}}));
  EXPECT_EQ(to_string(data.query_spec(kTrain)), "dp,-,-,-");
}

TEST(ShardingRules, WhatBroadcastsStaysWhole) {
  const ShardingRules rules = ShardingRules().for_mesh(kFullMesh);
  EXPECT_EQ(to_string(rules.bias_spec(kTrain, {1, 8, 1, 16})), "-,tp,-,-");
  EXPECT_EQ(to_string(rules.bias_spec(kTrain, {16, 16})), "sp,-");
  EXPECT_EQ(to_string(rules.bias_spec(kTrain, {8, 16, 16})), "tp,sp,-");
  EXPECT_EQ(rules.bias_spec(kTrain, {}), PartitionSpec());
  EXPECT_THROW((void)rules.bias_spec(kTrain, {1, 1, 1, 1, 1}), ArgumentError);
  EXPECT_THROW((void)rules.sinks_spec(kTrain, 3), ArgumentError);
}

TEST(ShardingRules, TheMostSpecificRuleWins) {
  ShardingRules rules;
  rules.set({SemanticAxis::head, kDecode, {"sp"}});
  rules.set({SemanticAxis::head, std::nullopt, {}});
  rules.set({SemanticAxis::query_length, kDecode, {}});
  EXPECT_EQ(to_string(rules.query_spec(kDecode)), "fsdp+dp,-,sp,-");
  EXPECT_EQ(to_string(rules.query_spec(kTrain)), "fsdp+dp,sp,-,-");
  rules.set({SemanticAxis::head, kDecode, {"tp", "sp"}});
  EXPECT_EQ(to_string(rules.query_spec(kDecode)), "fsdp+dp,-,tp+sp,-");
  EXPECT_THAT(rules.rules(), SizeIs(3));
}

TEST(ShardingRules, OrderOfSettingDoesNotMatter) {
  const std::vector<ShardingRule> set{{SemanticAxis::head, kDecode, {"sp"}},
                                      {SemanticAxis::batch, std::nullopt, {"dp"}},
                                      {SemanticAxis::head, std::nullopt, {}}};
  ShardingRules forwards;
  ShardingRules backwards;
  for (std::size_t i = 0; i < set.size(); ++i) {
    forwards.set(set[i]);
    backwards.set(set[set.size() - 1 - i]);
  }
  EXPECT_EQ(forwards, backwards);
  EXPECT_EQ(forwards.rules().front().axis, SemanticAxis::batch);
  EXPECT_EQ(forwards.rules().back().mode, kDecode);
}

TEST(ShardingRules, BatchAxesHaveOneOrderEverywhere) {
  ShardingRules rules;
  rules.set({SemanticAxis::batch, std::nullopt, {"dp", "fsdp"}});
  EXPECT_EQ(to_string(rules.query_spec(kTrain)[0]), "dp+fsdp");
  EXPECT_EQ(to_string(rules.kv_spec(kTrain)[0]), "dp+fsdp");
  EXPECT_EQ(to_string(rules.bias_spec(kTrain, {4, 1, 8, 8})[0]), "dp+fsdp");
  EXPECT_EQ(to_string(rules.kv_segments_spec(kTrain)[0]), "dp+fsdp");
  EXPECT_EQ(to_string(rules.lengths_spec(kTrain)[0]), "dp+fsdp");
}

TEST(ShardingRules, AnAxisOfTheUserThatTheMeshLacksIsAnError) {
  ShardingRules rules;
  rules.set({SemanticAxis::head, AttentionMode::insert, {"tp"}});
  EXPECT_NO_THROW((void)rules.for_mesh(kFullMesh));
  EXPECT_THAT(
      [&] {
        (void)rules.for_mesh(MeshShape({{"sp", 4}}));
      },
      ThrowsMessage<UnknownAxisError>(AllOf(HasSubstr("'tp'"), HasSubstr("sp"))));
}

TEST(ShardingRules, TwoDimensionsOnOneAxisAreAnError) {
  ShardingRules rules;
  rules.set({SemanticAxis::head, std::nullopt, {"sp"}});
  EXPECT_THROW((void)rules.query_spec(kTrain), DuplicateSpecError);
}

TEST(SemanticAxis, HasNames) {
  for (const SemanticAxis axis : kSemanticAxes) EXPECT_EQ(parse_semantic_axis(name_of(axis)), axis);
  EXPECT_THAT([] { (void)parse_semantic_axis("heads"); },
              ThrowsMessage<ArgumentError>(AllOf(HasSubstr("'heads'"), HasSubstr("kv_head"))));
}

TEST(StableSharding, FollowsTheContract) {
  const PartitionSpec spec = PartitionSpec::parse("dp,sp,tp,-");
  const std::vector<int> preserved{0, 2, 6};
  EXPECT_EQ(create_stable_sharding(spec, nullptr, true, preserved), spec);
  EXPECT_EQ(create_stable_sharding(spec, nullptr, false, preserved), spec);
  EXPECT_EQ(create_stable_sharding(spec, &kFullMesh, false, preserved), std::nullopt);
  EXPECT_EQ(create_stable_sharding(spec, &kFullMesh, true, preserved),
            PartitionSpec::parse("dp,-,tp,-"));
  EXPECT_EQ(create_stable_sharding(spec, &kFullMesh, true, std::nullopt), spec);
  EXPECT_EQ(create_stable_sharding(spec, &kFullMesh, true, std::vector<int>{}), PartitionSpec());
  EXPECT_THROW((void)create_stable_sharding(spec, &kFullMesh, true, std::vector<int>{-1}),
               ArgumentError);
}

}  // namespace
}  // namespace annulus
