#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <annulus/attention/score_tensors.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// Returns the entries of a region of a bias or a dense mask: [batch, heads, tokens, keys].
using ScoresOfRegion = std::function<ConstTensorView(const Region& region)>;

/// Bias and dense mask for a block's batches, heads and rows. They cover all `kv_length` keys of
/// the problem or the block's columns, as its buffers do.
[[nodiscard]] ScoreTensors block_scores(const RankPlan& plan, const Tile& block,
                                        std::int64_t kv_length, const ScoresOfRegion& view);

/// Appends the copies that cut a bias or a dense mask [b,n,t,S] to `keys`, into `to` [b,n,t,s].
/// Scores that are broadcast along the keys are not cut.
void add_key_copies(const ConstTensorView& scores, const PositionRanges& keys, const TensorView& to,
                    std::vector<TensorCopy>& copies);

}  // namespace annulus::ring
