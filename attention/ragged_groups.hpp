#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <annulus/attention/straight_pieces.hpp>

namespace annulus {

/// Some rows of one batch of a block against some of its columns.
struct RaggedSequence {
  std::int64_t batch = 0;
  LocalRange rows;
  LocalRange columns;
};

/// Sequences for one call of a kernel that takes many of different lengths and places, but one
/// band.
struct RaggedGroup {
  Band band;                      ///< counted from the first row and column of each sequence
  std::int64_t most_rows = 0;     ///< at least those of any sequence
  std::int64_t most_columns = 0;  ///< likewise
  std::vector<RaggedSequence> sequences;
};

struct RaggedGroups {
  std::vector<RaggedGroup> groups;
  bool every_row = false;  ///< whether every row of every batch is in some sequence
  std::string obstacle;    ///< why such calls cannot do it; the groups are empty then
};

/// Groups the straight pieces of a block of `batches` × `rows`. Kernels of the kind start as many
/// tiles of kRaggedTile rows for each sequence as the longest one has, so sequences of a group
/// differ by less than a factor of two in tiles. The most rows and columns are powers of two times
/// a tile, so that plans made for one block serve others. No row may be in two pieces: each call
/// writes its rows for good.
[[nodiscard]] RaggedGroups ragged_groups(const std::vector<StraightPiece>& pieces,
                                         std::int64_t batches, std::int64_t rows);

inline constexpr std::int64_t kRaggedTile = 128;

}  // namespace annulus
