#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include <annulus/attention/implementation.hpp>

#include "native/row_scores.hpp"
#include "native/tiles.hpp"

namespace annulus {

/// The part of some columns that positions, lengths and segments show to a row.
struct RowSight {
  LocalRange seen;          ///< the row sees no column outside this range …
  LocalRange gap = {};      ///< … nor inside this one
  bool by_segment = false;  ///< only columns of segment `id` among the others
  std::int32_t id = 0;
};

/// Tells what the rows of a block's tiles see. Heads of a tile see the same blocks of a block mask.
class TileVisibility {
 public:
  /// Both must outlive the object.
  TileVisibility(const AttentionProblem& problem, const AttentionBlock& block)
      : problem_(problem), block_(block) {}

  /// The pairs of `rows` of a tile and `columns` that the mask shows.
  [[nodiscard]] Visibility examine(const RowTile& tile, const HeadTile& heads,
                                   const PositionRange& rows, const PositionRange& columns) const;
  /// Calls visit(run) for the runs of visible blocks in the entries `seen` of `columns`, which is
  /// not empty.
  template <class Visit>
  void for_each_run(const RowTile& tile, const HeadTile& heads, const PositionRange& columns,
                    LocalRange seen, const Visit& visit) const {
    const std::optional<BlockMask>& blocks = problem_.mask.block_mask();
    if (!blocks || block_.unmasked) return visit(seen);
    const GlobalPosition end = columns.at(seen.end().value() - 1) + 1;
    for (GlobalPosition from = columns.at(seen.begin.value()); from < end;) {
      const BlockMask::Run run = blocks->next_run(
          block_.first_batch + tile.batch, block_.first_head + heads.begin, tile.rows.start, from);
      if (run.empty()) break;
      visit(columns.indices_within(run.begin, std::min(run.end, end)));
      from = run.end;
    }
  }
  /// The columns that the mask, without its blocks, shows to a row of a local batch; all if `full`.
  [[nodiscard]] RowSight sight(std::int64_t batch, GlobalPosition row, const PositionRange& columns,
                               bool full) const;
  /// The columns that the dense mask shows to some rows of a tile; none if the bias hides them all.
  [[nodiscard]] ShownColumns shown_by_scores(const RowTile& tile, const HeadTile& heads,
                                             LocalRange rows, const ScoreTensors::Keys& keys) const;
  /// Applies the bias, and the dense mask unless it shows all (`shown`), to the logits of columns
  /// of a row (a local index). Hidden logits become −∞. If there is a bias, the others become
  /// factor · logit + bias, and the first half of its `next` row is fetched.
  [[nodiscard]] SeenLogits apply_scores(std::int64_t batch, std::int64_t head, std::int64_t row,
                                        const ScoreTensors::Keys& keys, bool shown, float factor,
                                        float* logits, const float* next) const;

 private:
  const AttentionProblem& problem_;
  const AttentionBlock& block_;
};

}  // namespace annulus
