#include <chrono>

#include <gtest/gtest.h>

#include <annulus/attention/mask.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/random_mask.hpp"
#include "tests/support/thrown_by.hpp"

namespace annulus::test {
namespace {

constexpr std::int64_t kBatch = 3;
constexpr std::int64_t kQueryLength = 37;
constexpr std::int64_t kKvLength = 53;

PositionRange random_range(Random& random, std::int64_t size, std::int64_t stride) {
  const std::int64_t start = draw(random, 0, size - 1);
  return {GlobalPosition(start), draw(random, 0, (size - 1 - start) / stride + 1), stride};
}

LocalRange hull_of(const std::vector<bool>& seen) {
  std::int64_t begin = 0;
  auto end = static_cast<std::int64_t>(seen.size());
  while (begin < end && !seen[static_cast<std::size_t>(begin)]) ++begin;
  while (end > begin && !seen[static_cast<std::size_t>(end - 1)]) --end;
  return {LocalPosition(begin), end - begin};
}

void expect_within(const LocalRange& inner, const LocalRange& outer, std::int64_t length) {
  EXPECT_LE(outer.begin, inner.begin);
  EXPECT_GE(outer.end(), inner.end());
  EXPECT_GE(outer.begin.value(), 0);
  EXPECT_LE(outer.end().value(), length);
}

struct BruteForce {
  std::int64_t pairs = 0;
  bool full = true;
  LocalRange rows;
  LocalRange columns;
};

// Pairs are the mean over that many heads, rounded up in each batch.
BruteForce count(const Mask& mask, std::int64_t batch, std::int64_t batches,
                 const PositionRange& rows, const PositionRange& columns, std::int64_t heads = 1) {
  BruteForce result;
  std::vector<bool> seeing(static_cast<std::size_t>(rows.length));
  std::vector<bool> seen(static_cast<std::size_t>(columns.length));
  for (std::int64_t b = batch; b < batch + batches; ++b) {
    std::int64_t pairs = 0;
    for (std::int64_t i = 0; i < rows.length; ++i) {
      for (std::int64_t j = 0; j < columns.length; ++j) {
        for (std::int64_t h = 0; h < heads; ++h) {
          if (!mask.visible(b, h, rows.at(i), columns.at(j))) continue;
          ++pairs;
          seeing[static_cast<std::size_t>(i)] = true;
          seen[static_cast<std::size_t>(j)] = true;
        }
      }
    }
    result.pairs += (pairs + heads - 1) / heads;
    result.full = result.full && pairs == heads * rows.length * columns.length;
  }
  result.rows = hull_of(seeing);
  result.columns = hull_of(seen);
  return result;
}

// Pairs and `full` are exact; the hulls cover, and are exact for one batch of unstrided positions.
void expect_examined(const Mask& mask, std::int64_t batch, std::int64_t batches,
                     const PositionRange& rows, const PositionRange& columns,
                     std::int64_t heads = 1) {
  const BruteForce truth = count(mask, batch, batches, rows, columns, heads);
  const Visibility got = mask.examine(batch, batches, rows, columns);
  EXPECT_EQ(got.pairs, truth.pairs);
  EXPECT_EQ(got.empty(), truth.pairs == 0);
  if (truth.pairs == 0) return;
  EXPECT_EQ(got.full, truth.full);
  EXPECT_TRUE(!got.exact || got.full == (got.pairs == batches * rows.length * columns.length));
  expect_within(truth.rows, got.rows, rows.length);
  expect_within(truth.columns, got.columns, columns.length);
  if (batches == 1 && rows.stride == 1 && columns.stride == 1) {
    EXPECT_EQ(got.rows, truth.rows);
    EXPECT_EQ(got.columns, truth.columns);
  }
}

// Tiles of a mask, some of them strided, against the definition.
void expect_examined_in_tiles(Random& random, const Mask& mask, std::int64_t heads) {
  for (int tile = 0; tile < 12; ++tile) {
    const std::int64_t stride = tile % 3 == 0 ? 1 : draw(random, 1, 5);
    const std::int64_t other = tile % 3 == 2 ? draw(random, 1, 5) : stride;
    const PositionRange rows = random_range(random, kQueryLength, stride);
    const PositionRange columns = random_range(random, kKvLength, other);
    const std::int64_t batch = draw(random, 0, kBatch - 1);
    SCOPED_TRACE(to_string(mask) + " rows " + to_string(PositionRanges({rows})) + " columns " +
                 to_string(PositionRanges({columns})));
    expect_examined(mask, batch, draw(random, 1, kBatch - batch), rows, columns, heads);
    const std::int64_t head = draw(random, 0, heads - 1);
    std::int64_t pairs = 0;
    for (std::int64_t i = 0; i < rows.length; ++i) {
      for (std::int64_t j = 0; j < columns.length; ++j) {
        if (mask.visible(batch, head, rows.at(i), columns.at(j))) ++pairs;
      }
    }
    EXPECT_EQ(mask.examine_head(batch, head, rows, columns).pairs, pairs);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Mask, ExaminesLikeTheDefinition) {
  constexpr std::int64_t kHeads = 3;
  Random random(1);
  int by_head = 0;
  std::vector<std::vector<MaskKind>> all = all_combinations();
  all.emplace_back();
  for (const std::vector<MaskKind>& kinds : all) {
    for (int repeat = 0; repeat < 12; ++repeat) {
      Mask mask = random_mask(random, kinds, kBatch, kQueryLength, kKvLength);
      expect_examined_in_tiles(random, mask, 1);
      if (repeat % 2 == 0) {
        mask.set_block_mask(random_block_mask(random, kBatch, kHeads, kQueryLength, kKvLength, 20));
        mask.validate(kBatch, kHeads, kQueryLength, kKvLength);
        if (mask.depends_on_head()) ++by_head;
        expect_examined_in_tiles(random, mask, kHeads);
      }
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(by_head, 50);
}

// 16384 blocks in each of 32 heads.
TEST(Mask, ExaminesManyBlocksQuickly) {
  constexpr std::int64_t kLength = 16384;
  Mask mask;
  mask.set_causal(true);
  mask.set_block_mask(BlockMask::random(kLength, kLength, 32, 0.5, 1));
  const PositionRange all{GlobalPosition(0), kLength};
  const auto start = std::chrono::steady_clock::now();
  const Visibility seen = mask.examine(0, 1, all, all);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(500));
  EXPECT_NEAR(static_cast<double>(seen.pairs), 0.25 * kLength * kLength, 0.01 * kLength * kLength);
  EXPECT_FALSE(seen.full);
}

TEST(Mask, RowIntervalsAndSegmentsAreTheDefinition) {
  Random random(2);
  for (const std::vector<MaskKind>& kinds : all_combinations()) {
    const Mask mask = random_mask(random, kinds, kBatch, kQueryLength, kKvLength);
    SCOPED_TRACE(to_string(mask));
    for (std::int64_t b = 0; b < kBatch; ++b) {
      const auto query_ids = mask.query_segments(b);
      const auto kv_ids = mask.kv_segments(b);
      ASSERT_EQ(mask.has_segments(), !query_ids.empty());
      for (std::int64_t i = 0; i < kQueryLength; ++i) {
        const auto [opening, rest] = mask.row_intervals(b, GlobalPosition(i));
        ASSERT_LE(opening.begin, opening.end);
        ASSERT_LE(opening.end, rest.begin);
        ASSERT_LE(rest.begin, rest.end);
        for (std::int64_t j = 0; j < kKvLength; ++j) {
          const GlobalPosition column(j);
          bool visible = (column >= opening.begin && column < opening.end) ||
                         (column >= rest.begin && column < rest.end);
          if (visible && mask.has_segments()) {
            const std::int32_t id = query_ids[static_cast<std::size_t>(i)];
            visible = id >= 0 && kv_ids[static_cast<std::size_t>(j)] == id;
          }
          ASSERT_EQ(visible, mask.visible(b, 0, GlobalPosition(i), column)) << i << " " << j;
        }
      }
    }
  }
}

// Written out by hand: T = 6, S = 8.
TEST(Mask, PositionsSeeWhatTheyShould) {
  const auto shows = [](const Mask& mask, std::int64_t batch = 0) {
    std::string text;
    for (std::int64_t i = 0; i < 6; ++i) {
      for (std::int64_t j = 0; j < 8; ++j) {
        text += mask.visible(batch, 0, GlobalPosition(i), GlobalPosition(j)) ? '#' : '.';
      }
      text += i < 5 ? " " : "";
    }
    return text;
  };
  Mask prefix;
  prefix.set_causal(true);
  prefix.set_prefix(3);
  EXPECT_EQ(shows(prefix), "###..... ###..... ###..... ####.... #####... ######..");
  Mask sinks;
  sinks.set_causal(true);
  sinks.set_window(1, 0);
  sinks.set_sink_tokens(2);
  EXPECT_EQ(shows(sinks), "#....... ##...... ###..... ####.... ##.##... ##..##..");
  Mask chunk;
  chunk.set_chunk(3);
  chunk.set_offset(1);
  EXPECT_EQ(shows(chunk), "###..... ###..... ...###.. ...###.. ...###.. ......##");
  Mask offsets;
  offsets.set_causal(true);
  offsets.set_offsets({-2, 2});
  EXPECT_EQ(shows(offsets, 0), "........ ........ #....... ##...... ###..... ####....");
  EXPECT_EQ(shows(offsets, 1), "###..... ####.... #####... ######.. #######. ########");
  Mask packings;
  packings.set_causal(true);
  packings.set_packings(1, {0, 2, 6}, {0, 5, 8}, DocumentAlignment::bottom_right);
  EXPECT_EQ(shows(packings), "####.... #####... ........ .....#.. .....##. .....###");
  packings.set_packings(1, {0, 2, 6}, {0, 5, 8}, DocumentAlignment::top_left);
  EXPECT_EQ(shows(packings), "#....... ##...... .....#.. .....##. .....### .....###");
}

TEST(Mask, ManyChunksAreBoundedNotCounted) {
  constexpr std::int64_t kLength = std::int64_t{1} << 20;
  Mask mask;
  mask.set_chunk(4);
  const PositionRange all{GlobalPosition(0), kLength};
  const Visibility seen = mask.examine(0, 1, all, all);
  EXPECT_GE(seen.pairs, 4 * kLength);
  EXPECT_LE(seen.pairs, 7 * kLength);
  EXPECT_FALSE(seen.exact);
  EXPECT_FALSE(seen.full);
  const Visibility part = mask.examine(0, 1, all.slice(100, 2000), all);
  EXPECT_TRUE(part.exact);
  EXPECT_EQ(part.pairs, 8000);
}

TEST(Mask, WithoutPartsEverythingIsVisible) {
  const Mask mask;
  for (const std::int64_t stride : {1, 2, 7, 1000}) {
    const PositionRange rows{GlobalPosition(0), 5, stride};
    const PositionRange columns{GlobalPosition(3), 4, stride + 1};
    const Visibility seen = mask.examine(0, 2, rows, columns);
    EXPECT_EQ(seen.pairs, 40);
    EXPECT_TRUE(seen.full);
    EXPECT_EQ(seen.rows, (LocalRange{LocalPosition(0), 5}));
    EXPECT_EQ(seen.columns, (LocalRange{LocalPosition(0), 4}));
    const Mask::Interval interval = mask.row_intervals(0, rows.last())[1];
    EXPECT_EQ(columns.indices_within(interval.begin, interval.end).count, 4);
  }
}

TEST(Mask, EmptyTilesAreEmpty) {
  Mask mask;
  const PositionRange some{GlobalPosition(4), 3, 2};
  const PositionRange none{GlobalPosition(4), 0, 2};
  EXPECT_TRUE(mask.examine(0, 1, none, some).empty());
  EXPECT_TRUE(mask.examine(0, 1, some, none).empty());
  EXPECT_TRUE(mask.examine(0, 0, some, some).empty());
  mask.set_causal(true);
  EXPECT_TRUE(mask.examine(0, 1, {GlobalPosition(0), 4, 1}, {GlobalPosition(4), 4, 1}).empty());
}

TEST(Mask, FarPositionsAndDistancesDoNotOverflow) {
  const std::int64_t far = std::int64_t{1} << 40;
  const std::int64_t count = std::int64_t{1} << 20;
  const PositionRange near{GlobalPosition(0), count, 1};
  const PositionRange rows{GlobalPosition(far), count, 1};
  Mask causal;
  causal.set_causal(true);
  EXPECT_EQ(causal.examine(0, 1, rows, rows).pairs, count * (count + 1) / 2);
  EXPECT_TRUE(causal.examine(0, 1, rows, near).full);
  EXPECT_TRUE(causal.examine(0, 1, near, rows).empty());
  const PositionRange striped{GlobalPosition(far), count, 1024};
  EXPECT_EQ(causal.examine(0, 1, striped, striped).pairs, count * (count + 1) / 2);

  const std::int64_t furthest = std::int64_t{1} << 48;
  for (const std::int64_t offset : {-furthest, furthest}) {
    Mask mask;
    mask.set_causal(true);
    mask.set_offset(offset);
    EXPECT_EQ(mask.examine(0, 1, rows, near).full, offset > 0);
    EXPECT_EQ(mask.examine(0, 1, rows, near).empty(), offset < 0);
    mask.set_window(furthest, furthest);
    EXPECT_EQ(mask.examine(0, 1, rows, near).full, false);
    const Mask::Interval interval = mask.row_intervals(0, rows.last())[1];
    EXPECT_LE(interval.begin, interval.end);
  }
}

TEST(Mask, ManyShortSegmentsAreBoundedNotCounted) {
  // Alternating ids: every query run meets half of the key runs, too many to count.
  const std::int64_t length = 2048;
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < length; ++i) ids.push_back(static_cast<std::int32_t>(i % 2));
  Mask mask;
  mask.set_segments(1, ids, ids);
  mask.set_causal(true);
  const PositionRange all{GlobalPosition(0), length, 1};
  const Visibility seen = mask.examine(0, 1, all, all);
  const BruteForce truth = count(mask, 0, 1, all, all);
  EXPECT_GE(seen.pairs, truth.pairs);
  EXPECT_EQ(seen.pairs, length * (length + 1) / 2) << "what causality alone leaves";
  EXPECT_FALSE(seen.full);
  expect_within(truth.rows, seen.rows, length);
  expect_within(truth.columns, seen.columns, length);
  // Small tiles of the same mask are counted.
  expect_examined(mask, 0, 1, all.slice(100, 64), all.slice(80, 64));
}

template <class Action>
void expect_argument_error(const std::string& argument, const Action& action) {
  EXPECT_EQ(thrown_by<ArgumentError>(action).argument(), argument);
}

TEST(Mask, RefusesBadArguments) {
  Mask mask;
  const std::int64_t furthest = std::int64_t{1} << 48;
  expect_argument_error("window", [&] { mask.set_window(-2, 0); });
  expect_argument_error("window", [&] { mask.set_window(0, -2); });
  expect_argument_error("window", [&] { mask.set_window(furthest + 1, 0); });
  expect_argument_error("causal offset", [&] { mask.set_offset(furthest + 1); });
  expect_argument_error("causal offset", [&] { mask.set_offset(-furthest - 1); });
  expect_argument_error("segment ids", [&] { mask.set_segments(2, {0, 0, 0}, {0, 0}); });
  expect_argument_error("segment ids", [&] { mask.set_segments(2, {0, 0}, {0, 0, 0}); });
  expect_argument_error("segment ids", [&] { mask.set_segments(0, {0}, {}); });
  expect_argument_error("prefix", [&] { mask.set_prefix(-1); });
  expect_argument_error("prefix[1]", [&] { mask.set_prefixes({0, -1}); });
  expect_argument_error("sink tokens", [&] { mask.set_sink_tokens(-1); });
  expect_argument_error("chunk", [&] { mask.set_chunk(-1); });
  expect_argument_error("cu_seqlens_q[1]", [&] { mask.set_packings(1, {0, -1}, {0, 2}, {}); });
  expect_argument_error("cu_seqlens_kv[0]", [&] { mask.set_packings(1, {0, 1}, {1, 2}, {}); });
  expect_argument_error("cu_seqlens_kv", [&] { mask.set_packings(1, {0, 1}, {0, 2, 3}, {}); });
  expect_argument_error("q_lengths[1]", [&] { mask.set_query_lengths({3, -1}); });
  expect_argument_error("kv_lengths[0]", [&] { mask.set_kv_lengths({-5}); });
  EXPECT_EQ(to_string(mask), "none") << "a refused argument must change nothing";
}

TEST(Mask, ValidatesAgainstTheShape) {
  Mask segments;
  segments.set_segments(2, {0, 0, 1, 1}, {0, 0, 0, 1, 1, 1});
  EXPECT_NO_THROW(segments.validate(2, 1, 2, 3));
  expect_argument_error("query segment ids", [&] { segments.validate(2, 1, 3, 3); });
  expect_argument_error("kv segment ids", [&] { segments.validate(2, 1, 2, 2); });
  expect_argument_error("query segment ids", [&] { segments.validate(1, 1, 2, 3); });
  Mask lengths;
  lengths.set_query_lengths({2, 4});
  lengths.set_kv_lengths({5, 0});
  EXPECT_NO_THROW(lengths.validate(2, 1, 4, 5));
  expect_argument_error("q_lengths", [&] { lengths.validate(3, 1, 4, 5); });
  expect_argument_error("q_lengths[1]", [&] { lengths.validate(2, 1, 3, 5); });
  expect_argument_error("kv_lengths[0]", [&] { lengths.validate(2, 1, 4, 4); });
  Mask packings;
  packings.set_packings(2, {0, 2, 4}, {0, 5, 6}, {});
  EXPECT_NO_THROW(packings.validate(2, 1, 4, 6));
  packings.set_chunk(2);
  expect_argument_error("causal offset", [&] { packings.validate(2, 1, 4, 6); });
  packings.set_packings(2, {0, 2, 4}, {0, 5, 6}, DocumentAlignment::top_left);
  EXPECT_NO_THROW(packings.validate(2, 1, 4, 6));
  expect_argument_error("kv segment ids", [&] { packings.validate(2, 1, 4, 7); });
  packings.set_offset(1);
  expect_argument_error("causal offset", [&] { packings.validate(2, 1, 4, 6); });
  Mask each;
  each.set_offsets({1, 2});
  expect_argument_error("causal offset", [&] { each.validate(3, 1, 4, 5); });
  each.set_offset(0);
  each.set_prefixes({1, 2});
  expect_argument_error("prefix", [&] { each.validate(3, 1, 4, 5); });
  Mask blocks;
  blocks.set_block_mask(BlockMask({2, 3}, {4, 4}, std::vector<std::uint8_t>(6, 1)));
  EXPECT_NO_THROW(blocks.validate(7, 5, 8, 9));
  expect_argument_error("block mask", [&] { blocks.validate(7, 5, 9, 9); });
}

TEST(Mask, CuSeqlensBecomeSegments) {
  const std::vector<std::int32_t> sums{0, 2, 2, 5};
  EXPECT_EQ(segments_from_cu_seqlens(sums, 5), (std::vector<std::int32_t>{0, 0, 2, 2, 2}));
  EXPECT_EQ(segments_from_cu_seqlens(std::vector<std::int32_t>{0}, 0), std::vector<std::int32_t>{});
  const auto parse = [](std::vector<std::int32_t> values, std::int64_t length) {
    return [values = std::move(values), length] { (void)segments_from_cu_seqlens(values, length); };
  };
  expect_argument_error("cu_seqlens", parse({}, 0));
  expect_argument_error("cu_seqlens[0]", parse({1, 5}, 5));
  expect_argument_error("cu_seqlens[2]", parse({0, 3, 2, 5}, 5));
  expect_argument_error("cu_seqlens[1]", parse({0, 4}, 5));
  expect_argument_error("cu_seqlens[1]", parse({0, 6}, 5));
}

TEST(Mask, CountsPairsOfDifferentStridesWhateverTheLength) {
  // Too many rows to go through one by one.
  constexpr std::int64_t kMany = std::int64_t{1} << 30;
  Mask below;
  below.set_causal(true);
  Mask above;
  above.set_window(0, -1);  // j ≥ i + offset
  above.set_offset(1);
  Random random(5);
  for (int repeat = 0; repeat < 20000; ++repeat) {
    const PositionRange rows{GlobalPosition(draw(random, 0, kMany)), kMany, draw(random, 1, 9)};
    const PositionRange columns{GlobalPosition(draw(random, 0, kMany)), kMany, draw(random, 1, 9)};
    ASSERT_EQ(below.examine(0, 1, rows, columns).pairs + above.examine(0, 1, rows, columns).pairs,
              kMany * kMany);
  }
}

// Looking at every document in every call would take minutes.
TEST(Mask, TilesFarApartCostNothing) {
  constexpr std::int64_t kDocuments = 100000;
  constexpr std::int64_t kEach = 4;
  std::vector<std::int32_t> ids;
  for (std::int32_t id = 0; id < kDocuments; ++id) ids.insert(ids.end(), kEach, id);
  Mask mask;
  mask.set_segments(1, ids, ids);
  const std::int64_t half = kDocuments * kEach / 2;
  const auto start = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < 100000; ++i) {
    const PositionRange rows{GlobalPosition(i % 4), half};
    // One document in the half of the rows, and one beyond.
    ASSERT_EQ(mask.examine(0, 1, rows, {GlobalPosition(half - kEach), kEach}).pairs, kEach * kEach);
    ASSERT_TRUE(mask.examine(0, 1, rows, {GlobalPosition(half + kEach), half - kEach}).empty());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(Mask, RunsAreThoseOfTheIds) {
  Mask mask;
  EXPECT_TRUE(mask.query_runs(0, GlobalPosition(0), GlobalPosition(9)).empty());
  EXPECT_TRUE(mask.kv_runs(0, 0).empty());
  mask.set_segments(2, {0, 0, -1, 2, 2, 0, 5, 5, 5, 5, 5, 5},
                    {3, 0, 0, -1, 0, 3, 5, 5, 5, 5, 5, 5});
  const auto query = mask.query_runs(0, GlobalPosition(1), GlobalPosition(5));
  ASSERT_EQ(query.size(), 2U);
  EXPECT_EQ(query[0].id, 0);
  EXPECT_EQ(query[0].begin, GlobalPosition(0));
  EXPECT_EQ(query[0].end, GlobalPosition(2));
  EXPECT_EQ(query[1].id, 2);
  EXPECT_TRUE(mask.query_runs(0, GlobalPosition(2), GlobalPosition(3)).empty());
  const auto kv = mask.kv_runs(0, 0);
  ASSERT_EQ(kv.size(), 2U);
  EXPECT_EQ(kv[0].begin, GlobalPosition(1));
  EXPECT_EQ(kv[0].end, GlobalPosition(3));
  EXPECT_EQ(kv[1].begin, GlobalPosition(4));
  EXPECT_TRUE(mask.kv_runs(0, 5).empty());
  EXPECT_EQ(mask.kv_runs(1, 5).size(), 1U);
}

TEST(Mask, DescribesItself) {
  Mask mask;
  mask.set_causal(true);
  mask.set_offset(3);
  mask.set_window(100, 0);
  mask.set_segments(1, {0}, {0});
  mask.set_kv_lengths({1});
  EXPECT_EQ(to_string(mask), "causal, offset 3, window 100,0, segments, kv_lengths");
  Mask positions;
  positions.set_prefix(2);
  positions.set_sink_tokens(4);
  positions.set_chunk(64);
  positions.set_packings(1, {0, 1}, {0, 1}, DocumentAlignment::bottom_right);
  EXPECT_EQ(to_string(positions), "prefix 2, sink tokens 4, chunk 64, packings bottom-right");
  EXPECT_TRUE(mask.depends_on_batch());
  EXPECT_FALSE(mask.depends_on_head());
  mask.set_block_mask(BlockMask({3, 1, 1}, {64, 32}, std::vector<std::uint8_t>{0, 1, 1}));
  EXPECT_EQ(to_string(mask), "causal, offset 3, window 100,0, segments, kv_lengths, blocks 64,32");
  EXPECT_TRUE(mask.depends_on_head());
}

TEST(Mask, DigestsDiffer) {
  const auto digest = [](const auto& change) {
    Mask mask;
    change(mask);
    return mask.digest();
  };
  const auto blocks = [](std::vector<std::uint8_t> entries, BlockSize size) {
    return [=](Mask& mask) { mask.set_block_mask(BlockMask({2, 2}, size, entries)); };
  };
  const std::vector<std::uint64_t> all{digest([](Mask&) {}),
                                       digest([](Mask& mask) { mask.set_prefix(1); }),
                                       digest([](Mask& mask) { mask.set_prefixes({1}); }),
                                       digest([](Mask& mask) { mask.set_sink_tokens(1); }),
                                       digest([](Mask& mask) { mask.set_chunk(1); }),
                                       digest([](Mask& mask) { mask.set_offsets({1}); }),
                                       digest([](Mask& mask) { mask.set_causal(true); }),
                                       digest(blocks({1, 0, 0, 1}, {})),
                                       digest(blocks({1, 0, 1, 1}, {})),
                                       digest(blocks({1, 0, 0, 1}, {64, 128})),
                                       digest(blocks({1, 0, 0, 1}, {128, 64}))};
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(all[i], all[j]) << i << " " << j;
  }
  EXPECT_EQ(digest(blocks({1, 0, 0, 1}, {})), digest(blocks({1, 0, 0, 1}, {})));
}

}  // namespace
}  // namespace annulus::test
