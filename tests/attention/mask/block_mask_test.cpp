#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/attention/mask.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/random_mask.hpp"
#include "tests/support/for_each_index.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Entries = std::vector<std::uint8_t>;

// By their entries: 'x' for a visible block; query blocks are rows.
std::string picture(const BlockMask& mask) {
  std::string text;
  const std::vector<std::int32_t> entries = mask.entries();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (i > 0 && static_cast<std::int64_t>(i) % mask.shape()[3] == 0) text += '/';
    text += entries[i] != 0 ? 'x' : '.';
  }
  return text;
}

TEST(BlockMask, BroadcastsLikeNumPy) {
  Random random(1);
  constexpr std::int64_t kBatch = 2;
  constexpr std::int64_t kHeads = 3;
  constexpr std::int64_t kRows = 19;
  constexpr std::int64_t kColumns = 150;
  for (int repeat = 0; repeat < 200; ++repeat) {
    const BlockMask mask = random_block_mask(random, kBatch, kHeads, kRows, kColumns, 7);
    ASSERT_NO_THROW(mask.validate(kBatch, kHeads, kRows, kColumns));
    const std::vector<std::int32_t> entries = mask.entries();
    const Extents strides = contiguous_strides(mask.shape());
    const auto entry = [&](const Extents& block) {
      std::int64_t at = 0;
      for (int dim = 0; dim < 4; ++dim) {
        if (mask.shape()[dim] > 1) at += block[dim] * strides[dim];
      }
      return entries[static_cast<std::size_t>(at)] != 0;
    };
    for_each_of<4>({kBatch, kHeads, kRows, kColumns}, [&](auto b, auto h, auto i, auto j) {
      ASSERT_EQ(mask.visible(b, h, GlobalPosition(i), GlobalPosition(j)),
                entry({b, h, i / mask.size().query, j / mask.size().kv}));
    });
  }
}

TEST(BlockMask, RunsAreWhatIsVisible) {
  Random random(2);
  constexpr std::int64_t kRows = 23;
  constexpr std::int64_t kColumns = 400;
  for (int repeat = 0; repeat < 300; ++repeat) {
    const BlockMask mask = random_block_mask(random, 2, 2, kRows, kColumns, 9);
    for (std::int64_t i = 0; i < kRows;) {
      const std::int64_t b = draw(random, 0, 1);
      const std::int64_t h = draw(random, 0, 1);
      const GlobalPosition row(i);
      std::vector<bool> seen(kColumns);
      GlobalPosition from(draw(random, 0, kColumns - 1));
      const std::int64_t first = from.value();
      for (;;) {
        const BlockMask::Run run = mask.next_run(b, h, row, from);
        if (run.empty()) break;
        ASSERT_GE(run.begin, from);
        for (std::int64_t j = run.begin.value(); j < std::min(kColumns, run.end.value()); ++j) {
          seen[static_cast<std::size_t>(j)] = true;
        }
        from = run.end;
      }
      const std::int64_t end = std::min(kRows, mask.end_of_rows(row).value());
      ASSERT_GT(end, i);
      for (; i < end; ++i) {
        for (std::int64_t j = first; j < kColumns; ++j) {
          ASSERT_EQ(seen[static_cast<std::size_t>(j)],
                    mask.visible(b, h, GlobalPosition(i), GlobalPosition(j)));
        }
      }
    }
  }
}

TEST(BlockMask, NamedPatterns) {
  EXPECT_EQ(picture(BlockMask::causal(8, 8, {2, 2})), "x.../xx../xxx./xxxx");
  EXPECT_EQ(picture(BlockMask::causal(4, 8, {2, 2}, 4)), "xxx./xxxx");
  EXPECT_EQ(picture(BlockMask::causal(5, 5, {2, 3})), "x./xx/xx");
  EXPECT_EQ(picture(BlockMask::window(8, 8, 1, 0, {2, 2})), "x.../xx../.xx./..xx");
  EXPECT_EQ(picture(BlockMask::sinks_and_window(8, 8, 1, 1, 0, {2, 2})), "x.../xx../xxx./x.xx");
  EXPECT_EQ(picture(BlockMask::documents(std::vector<std::int32_t>{0, 3, 3, 8}, {2, 2})),
            "xx../xxxx/.xxx/.xxx");
  EXPECT_EQ(picture(BlockMask::strided(12, 12, 2, 3, {2, 2})),
            "x...../xx..../.xx.../x.xx../.x.xx./..x.xx");
  EXPECT_EQ(picture(BlockMask::strided(4, 8, 1, 2, {4, 2})), ".x..");
}

// A window's blocks are the blocks in which it shows something: nothing is lost.
TEST(BlockMask, CoversWhatTheMaskShows) {
  Random random(3);
  for (const std::vector<MaskKind>& kinds : mask_combinations()) {
    const Mask mask = random_mask(random, kinds, 2, 30, 40);
    const BlockSize size{draw(random, 1, 12), draw(random, 1, 12)};
    const BlockMask blocks = BlockMask::covering(mask, 2, 30, 40, size);
    ASSERT_NO_THROW(blocks.validate(2, 1, 30, 40));
    std::int64_t visible = 0;
    std::vector<std::int32_t> needed(blocks.entries().size());
    for_each_of<3>({2, 30, 40}, [&](auto b, auto i, auto j) {
      if (!mask.visible(b, 0, GlobalPosition(i), GlobalPosition(j))) return;
      ++visible;
      const std::int64_t batch = blocks.batch() == 1 ? 0 : b;
      needed[static_cast<std::size_t>(
          (batch * blocks.shape()[2] + i / size.query) * blocks.shape()[3] + j / size.kv)] = 1;
    });
    EXPECT_EQ(needed, blocks.entries()) << to_string(mask) << " " << visible;
  }
}

TEST(BlockMask, RandomBlocksHaveTheirDensityAndRepeat) {
  for (const double density : {0.0, 0.06, 0.5, 1.0}) {
    const BlockMask mask = BlockMask::random(4096, 8192, 4, density, 7);
    EXPECT_EQ(mask.shape(), (Extents{1, 4, 32, 64}));
    EXPECT_NEAR(mask.density(), density, 0.02);
    EXPECT_TRUE(mask == BlockMask::random(4096, 8192, 4, density, 7));
  }
  EXPECT_FALSE(BlockMask::random(4096, 8192, 4, 0.5, 7) ==
               BlockMask::random(4096, 8192, 4, 0.5, 8));
  EXPECT_NE(BlockMask::random(512, 512, 1, 0.5, 7).digest(),
            BlockMask::random(512, 512, 1, 0.5, 8).digest());
}

TEST(BlockMask, EmptySequencesHaveNoBlocks) {
  const BlockMask none = BlockMask::causal(0, 300);
  EXPECT_EQ(none.shape(), (Extents{1, 1, 0, 3}));
  EXPECT_NO_THROW(none.validate(2, 2, 0, 300));
  EXPECT_EQ(none.density(), 0);
  EXPECT_NO_THROW(BlockMask::causal(300, 0).validate(1, 1, 300, 0));
  EXPECT_TRUE(
      BlockMask::causal(300, 0).next_run(0, 0, GlobalPosition(5), GlobalPosition(0)).empty());
}

TEST(BlockMask, RefusesBadArguments) {
  const auto message = [](const auto& action) { return message_of<ArgumentError>(action); };
  const auto make = [&](const Extents& shape, BlockSize size, const Entries& entries) {
    return message([&] { (void)BlockMask(shape, size, entries); });
  };
  EXPECT_THAT(make({1}, {0, 4}, {1}), AllOf(HasSubstr("block size"), HasSubstr("0,4")));
  EXPECT_THAT(make({1, 1, 1, 1, 1}, {}, {1}), HasSubstr("[1, 1, 1, 1, 1]"));
  EXPECT_THAT(make({2, 2}, {}, {1}),
              AllOf(HasSubstr("1 entries"), HasSubstr("4 for shape [2, 2]")));
  EXPECT_THAT(make({2}, {}, {1, 2}), AllOf(HasSubstr("block mask[1]"), HasSubstr("0 or 1")));
  EXPECT_THAT(message([] { (void)BlockMask::random(8, 8, 1, 1.5, 0); }), HasSubstr("density"));
  EXPECT_THAT(message([] { (void)BlockMask::strided(8, 8, 1, 0); }), HasSubstr("stride"));
  EXPECT_THAT(message([] { (void)BlockMask::strided(8, 8, -1, 1); }), HasSubstr("local"));
  EXPECT_THAT(message([] { (void)BlockMask::sinks_and_window(8, 8, -1, 1, 1); }),
              HasSubstr("sinks"));
  EXPECT_THAT(message([] { (void)BlockMask::window(8, 8, -2, 1); }), HasSubstr("window"));
  EXPECT_THAT(message([] {
                (void)BlockMask::documents(std::vector<std::int32_t>{1, 8});
              }),
              HasSubstr("cu_seqlens[0]"));
  const BlockMask mask({2, 3}, {4, 4}, Entries(6, 1));
  EXPECT_NO_THROW(mask.validate(1, 1, 8, 12));
  for (const auto& [rows, columns] : {std::pair{9, 12}, std::pair{8, 13}, std::pair{4, 12}}) {
    EXPECT_THAT(message([&, t = rows, s = columns] { mask.validate(1, 1, t, s); }),
                AllOf(HasSubstr("[1, 1, 2, 3]"), HasSubstr("[B, N, ⌈T/4⌉, ⌈S/4⌉] = [1, 1, ")));
  }
  const BlockMask heads({3, 1, 1}, {4, 4}, Entries(3, 1));
  EXPECT_NO_THROW(heads.validate(5, 3, 100, 100));
  EXPECT_THAT(message([&] { heads.validate(5, 4, 100, 100); }), HasSubstr("[5, 4, 25, 25]"));
}

}  // namespace
}  // namespace annulus::test
