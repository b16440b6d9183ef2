#include "ragged_groups.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

namespace annulus {
namespace {

struct Banded {
  Band band;
  RaggedSequence sequence;
};

// The pieces batch by batch.
std::vector<Banded> sequences_of(const std::vector<StraightPiece>& pieces) {
  std::vector<Banded> all;
  for (const StraightPiece& piece : pieces) {
    for (std::int64_t b = 0; b < piece.batches; ++b) {
      const auto i = static_cast<std::size_t>(b);
      const bool padded = piece.mask.padded();
      const std::int64_t rows = padded ? piece.mask.row_lengths[i] : piece.rows.count;
      const std::int64_t columns = padded ? piece.mask.column_lengths[i] : piece.columns.count;
      if (rows == 0 || columns == 0) continue;
      all.push_back(
          {piece.mask.band,
           {piece.first_batch + b, {piece.rows.begin, rows}, {piece.columns.begin, columns}}});
    }
  }
  return all;
}

// Whether `band` shows of a sequence what the sequence's own band does.
bool means_the_same(const Band& band, const Banded& own) {
  const bool high = band.high == own.band.high || (own.band.high == Band::kUnlimited &&
                                                   band.high >= own.sequence.columns.count - 1);
  const bool low = band.low == own.band.low ||
                   (own.band.low == -Band::kUnlimited && band.low <= 1 - own.sequence.rows.count);
  return high && low;
}

std::int64_t tile_class(std::int64_t count) {
  const std::int64_t tiles = (count + kRaggedTile - 1) / kRaggedTile;
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(tiles))) * kRaggedTile;
}

RaggedGroups refusal(std::string obstacle) {
  RaggedGroups none;
  none.obstacle = std::move(obstacle);
  return none;
}

int limited_sides(const Band& band) {
  return static_cast<int>(band.high != Band::kUnlimited) +
         static_cast<int>(band.low != -Band::kUnlimited);
}

}  // namespace

RaggedGroups ragged_groups(const std::vector<StraightPiece>& pieces, std::int64_t batches,
                           std::int64_t rows) {
  for (const StraightPiece& piece : pieces) {
    if (!piece.mask.obstacle.empty()) return refusal(piece.mask.obstacle);
  }
  std::vector<Banded> all = sequences_of(pieces);
  std::sort(all.begin(), all.end(), [](const Banded& a, const Banded& b) {
    return std::tuple(a.sequence.batch, a.sequence.rows.begin) <
           std::tuple(b.sequence.batch, b.sequence.rows.begin);
  });
  std::int64_t covered = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    covered += all[i].sequence.rows.count;
    if (i > 0 && all[i].sequence.batch == all[i - 1].sequence.batch &&
        all[i].sequence.rows.begin < all[i - 1].sequence.rows.end()) {
      return refusal("some rows see columns of two straight pieces");
    }
  }

  // Bands with the most limits first: sequences too short to be limited join them.
  std::vector<Band> bands;
  std::vector<const Banded*> by_limits;
  for (const Banded& one : all) by_limits.push_back(&one);
  std::stable_sort(by_limits.begin(), by_limits.end(), [](const Banded* a, const Banded* b) {
    return limited_sides(a->band) > limited_sides(b->band);
  });
  std::map<std::pair<std::size_t, std::int64_t>, RaggedGroup> groups;  // by band, by length
  for (const Banded* one : by_limits) {
    auto band = std::find_if(bands.begin(), bands.end(),
                             [&](const Band& known) { return means_the_same(known, *one); });
    if (band == bands.end()) band = bands.insert(bands.end(), one->band);
    const std::int64_t most_rows = tile_class(one->sequence.rows.count);
    RaggedGroup& group = groups[{static_cast<std::size_t>(band - bands.begin()), most_rows}];
    group.band = *band;
    group.most_rows = most_rows;
    group.most_columns = std::max(group.most_columns, tile_class(one->sequence.columns.count));
    group.sequences.push_back(one->sequence);
  }
  RaggedGroups result;
  result.every_row = covered == batches * rows;
  for (auto& [key, group] : groups) result.groups.push_back(std::move(group));
  return result;
}

}  // namespace annulus
