#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <annulus/attention/score_tensors.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/partition/position.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// Returns the entries of a region of a bias or a dense mask: [batch, heads, tokens, keys].
using ScoresOfRegion = std::function<ConstTensorView(const Region& region)>;

/// Bias and dense mask of a block's batches, heads and rows, for all `kv_length` keys of the
/// problem or for the block's columns, as its buffers have them.
[[nodiscard]] ScoreTensors block_scores(const RankPlan& plan, const Tile& block,
                                        std::int64_t kv_length, const ScoresOfRegion& view);

/// Appends the copies that cut a bias or a dense mask [b,n,t,S] of all keys to these ones, in `to`
/// [b,n,t,s]. One that is broadcast along the keys stays as it is.
void add_key_copies(const ConstTensorView& scores, const PositionRanges& keys, const TensorView& to,
                    std::vector<TensorCopy>& copies);

}  // namespace annulus::ring
