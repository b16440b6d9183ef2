#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/sequence_layout.hpp>

namespace annulus {
namespace {

TEST(Distribution, BlocksMustDivide) {
  const Distribution block;
  for (std::int64_t size = 0; size <= 24; ++size) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      ASSERT_EQ(block.fits(size, ranks), size % ranks == 0);
      if (!block.fits(size, ranks)) continue;
      for (int t = 0; t < ranks; ++t) {
        const PositionRanges held = block.positions(size, ranks, t);
        EXPECT_EQ(held, PositionRanges({{GlobalPosition(t * size / ranks), size / ranks, 1}}));
        EXPECT_EQ(block.copies(size, ranks), 1);
      }
    }
  }
}

TEST(Distribution, KvHeadsAreTheOnesThatTheQueryHeadsRead) {
  for (std::int64_t kv_heads = 1; kv_heads <= 8; ++kv_heads) {
    for (int ranks = 1; ranks <= 16; ++ranks) {
      const Distribution distribution = Distribution::kv_heads();
      const bool fits = kv_heads % ranks == 0 || ranks % kv_heads == 0;
      ASSERT_EQ(distribution.fits(kv_heads, ranks), fits);
      if (!fits) continue;
      const std::int64_t heads = kv_heads * ranks;  // some number that both divide
      for (int t = 0; t < ranks; ++t) {
        const PositionRanges queries = Distribution::block().positions(heads, ranks, t);
        const PositionRanges held = distribution.positions(kv_heads, ranks, t);
        const std::int64_t group = heads / kv_heads;
        EXPECT_EQ(held.global(LocalPosition(0)).value(),
                  queries.global(LocalPosition(0)).value() / group);
        EXPECT_EQ(held.global(LocalPosition(held.size() - 1)).value(),
                  queries.global(LocalPosition(queries.size() - 1)).value() / group);
        if (kv_heads < ranks) {
          EXPECT_EQ(held.size(), 1);
          EXPECT_EQ(held.global(LocalPosition(0)).value(), t * kv_heads / ranks);
          EXPECT_EQ(distribution.copies(kv_heads, ranks), ranks / kv_heads);
        }
      }
    }
  }
}

TEST(Distribution, SequencesFollowTheirLayout) {
  const Distribution zigzag = Distribution::sequence(LayoutKind::zigzag, 2);
  EXPECT_TRUE(zigzag.fits(3, 8));
  const SequenceLayout layout(LayoutKind::zigzag, 23, 3, 2);
  for (int t = 0; t < 3; ++t) EXPECT_EQ(zigzag.positions(23, 3, t), layout.positions(t));
  EXPECT_THROW((void)Distribution::sequence(LayoutKind::zigzag, 0), ArgumentError);
  EXPECT_THROW((void)Distribution::sequence(LayoutKind::striped, 2), ArgumentError);
  EXPECT_THROW((void)Distribution::sequence(LayoutKind::balanced), ArgumentError);
}

TEST(Distribution, Prints) {
  EXPECT_EQ(to_string(Distribution()), "block");
  EXPECT_EQ(to_string(Distribution::kv_heads()), "kv_heads");
  EXPECT_EQ(to_string(Distribution::sequence()), "contiguous");
  EXPECT_EQ(to_string(Distribution::sequence(LayoutKind::striped)), "striped");
  EXPECT_EQ(to_string(Distribution::sequence(LayoutKind::zigzag, 128)), "zigzag:128");
}

}  // namespace
}  // namespace annulus
