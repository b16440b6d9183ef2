#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/sharding_rules.hpp>

namespace annulus {
namespace {

TEST(AttentionMode, HasNames) {
  for (const AttentionMode mode : kAttentionModes) {
    EXPECT_EQ(parse_attention_mode(name_of(mode)), mode);
  }
  EXPECT_EQ(parse_attention_mode("autoregressive"), AttentionMode::autoregressive);
  EXPECT_THAT([] { (void)parse_attention_mode("decode"); },
              ::testing::ThrowsMessage<ArgumentError>(
                  ::testing::HasSubstr("train, prefill, autoregressive or insert")));
}

TEST(AttentionMode, IsInferredFromTheQueryLength) {
  EXPECT_EQ(infer_attention_mode(1), AttentionMode::autoregressive);
  EXPECT_EQ(infer_attention_mode(0), AttentionMode::train);
  EXPECT_EQ(infer_attention_mode(2), AttentionMode::train);
}

}  // namespace
}  // namespace annulus
