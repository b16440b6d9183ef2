#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/partition/sequence_layout.hpp>

#include "flash/lists/list_plan.hpp"
#include "tests/attention/random_mask.hpp"

// Random masks and positions for work lists.
namespace annulus::test {

/// A rank's positions in a random layout, or a part of them.
inline PositionRanges random_positions(Random& random, std::int64_t length) {
  const LayoutKind kinds[] = {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped};
  const int ranks = static_cast<int>(draw(random, 1, 4));
  const SequenceLayout layout(kinds[draw(random, 0, 2)], length, ranks);
  const PositionRanges all = layout.positions(static_cast<int>(draw(random, 0, ranks - 1)));
  const std::int64_t begin = draw(random, 0, all.size() - 1);
  return draw(random, 0, 1) == 0
             ? all
             : all.slice({LocalPosition(begin), draw(random, 1, all.size() - begin)});
}

struct ListCase {
  Mask mask;
  flash::BatchesAndHeads of;
  PositionRanges rows;
  PositionRanges columns;
  int tile_rows = 8;
  int tile_columns = 6;

  [[nodiscard]] flash::ListPlan plan() const {
    return {mask, of, rows, columns, tile_rows, tile_columns};
  }
};

inline std::string to_string(const ListCase& one) {
  return to_string(one.mask) + ", rows " + to_string(one.rows) + ", columns " +
         to_string(one.columns) + ", tiles " + std::to_string(one.tile_rows) + " x " +
         std::to_string(one.tile_columns);
}

/// A mask with these parts, and sometimes blocks, for three heads of two of the four batches.
inline ListCase random_list_case(Random& random, const std::vector<MaskKind>& kinds,
                                 std::int64_t length, int tile_rows, int tile_columns) {
  constexpr std::int64_t kBatches = 4;
  constexpr std::int64_t kHeads = 5;
  ListCase one;
  one.of = {draw(random, 0, 2), 2, draw(random, 0, 2), 3};
  one.tile_rows = tile_rows;
  one.tile_columns = tile_columns;
  one.mask = random_mask(random, kinds, kBatches, length, length);
  if (draw(random, 0, 2) == 0) {
    // Large enough that there are not millions of them.
    const std::int64_t largest = 3 * tile_columns;
    const std::int64_t smallest = std::min(largest, 1 + length / 150);
    one.mask.set_block_mask(
        random_block_mask(random, kBatches, kHeads, length, length, largest, smallest));
  }
  one.rows = random_positions(random, length);
  one.columns = draw(random, 0, 2) == 0 ? one.rows : random_positions(random, length);
  return one;
}

}  // namespace annulus::test
