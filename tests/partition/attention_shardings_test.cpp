#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/sharding_rules.hpp>

namespace annulus {
namespace {

const MeshShape kMesh({{"dp", 2}, {"fsdp", 1}, {"ep", 1}, {"tp", 2}, {"sp", 4}});

TEST(AttentionShardings, DefaultsAreThoseOfTheContractInEveryMode) {
  for (const AttentionMode mode : kAttentionModes) {
    const AttentionShardings shardings = get_shardings({}, kMesh, mode);
    EXPECT_EQ(to_string(shardings.query), "fsdp+dp,sp,tp,-");
    EXPECT_EQ(to_string(shardings.key), "fsdp+dp,sp,tp,-");
    EXPECT_EQ(to_string(shardings.value), "fsdp+dp,sp,tp,-");
    EXPECT_EQ(to_string(shardings.output), "fsdp+dp,sp,tp,-");
    EXPECT_EQ(to_string(shardings.lse), "fsdp+dp,tp,sp");
    EXPECT_EQ(to_string(shardings.weights), "fsdp+dp,tp,sp,-");
    EXPECT_EQ(to_string(shardings.bias), "fsdp+dp,tp,sp,-");
    EXPECT_EQ(to_string(shardings.mask), "fsdp+dp,tp,sp,-");
    EXPECT_EQ(to_string(shardings.query_segments), "fsdp+dp,sp");
    EXPECT_EQ(to_string(shardings.kv_segments), "fsdp+dp,sp");
    EXPECT_EQ(to_string(shardings.lengths), "fsdp+dp");
    EXPECT_EQ(to_string(shardings.sinks), "tp,-");
  }
}

TEST(AttentionShardings, WhatBroadcastsIsWhole) {
  const AttentionShardings shardings =
      get_shardings({}, kMesh, AttentionMode::train,
                    {.bias = Extents{2, 1, 8, 8}, .mask = Extents{1, 8}, .sinks_rank = 1});
  EXPECT_EQ(to_string(shardings.bias), "fsdp+dp,-,sp,-");
  EXPECT_EQ(to_string(shardings.mask), "-,-");
  EXPECT_EQ(shardings.sinks, PartitionSpec());
  EXPECT_EQ(to_string(shardings.weights), "fsdp+dp,tp,sp,-");
}

TEST(AttentionShardings, HeadsFirst) {
  const MeshShape mesh({{"sp", 4}, {"tp", 2}});
  const AttentionShardings shardings =
      get_shardings({}, mesh, AttentionMode::train, {.bhtd = true});
  for (const PartitionSpec& spec :
       {shardings.query, shardings.key, shardings.value, shardings.output}) {
    EXPECT_EQ(to_string(spec), "-,tp,sp,-");
  }
  EXPECT_EQ(to_string(shardings.lse), "-,tp,sp");
}

TEST(AttentionShardings, ModesMayDifferAndNoneIsHonoured) {
  ShardingRules rules;
  rules.set({SemanticAxis::query_length, AttentionMode::autoregressive, {}});
  rules.set({SemanticAxis::head, AttentionMode::prefill, {}});
  rules.set({SemanticAxis::kv_head, AttentionMode::prefill, {}});
  const auto of = [&](AttentionMode mode) { return get_shardings(rules, kMesh, mode); };
  EXPECT_EQ(to_string(of(AttentionMode::autoregressive).query), "fsdp+dp,-,tp,-");
  EXPECT_EQ(to_string(of(AttentionMode::autoregressive).key), "fsdp+dp,sp,tp,-");
  EXPECT_EQ(to_string(of(AttentionMode::autoregressive).query_segments), "fsdp+dp,-");
  EXPECT_EQ(to_string(of(AttentionMode::prefill).query), "fsdp+dp,sp,-,-");
  EXPECT_EQ(to_string(of(AttentionMode::prefill).sinks), "-,-");
  for (const AttentionMode mode : {AttentionMode::train, AttentionMode::insert}) {
    EXPECT_EQ(to_string(of(mode).query), "fsdp+dp,sp,tp,-");
  }
}

TEST(AttentionShardings, BadRulesAndShapesAreRefused) {
  ShardingRules rules;
  rules.set({SemanticAxis::head, AttentionMode::insert, {"pp"}});
  EXPECT_THROW((void)get_shardings(rules, kMesh, AttentionMode::train), UnknownAxisError);
  rules.set({SemanticAxis::head, AttentionMode::insert, {"sp"}});
  EXPECT_NO_THROW((void)get_shardings(rules, kMesh, AttentionMode::train));
  EXPECT_THROW((void)get_shardings(rules, kMesh, AttentionMode::insert), DuplicateSpecError);
  EXPECT_THROW(
      (void)get_shardings({}, kMesh, AttentionMode::train, {.mask = Extents{1, 1, 1, 1, 1}}),
      ArgumentError);
  EXPECT_THROW((void)get_shardings({}, kMesh, AttentionMode::train, {.sinks_rank = 3}),
               ArgumentError);
}

}  // namespace
}  // namespace annulus
