#include <annulus/ring/block_scores.hpp>

namespace annulus::ring {
namespace {

// The entries for `keys` of a bias or a mask over all keys.
ConstTensorView keys_of(const ConstTensorView& scores, const PositionRange& keys) {
  const std::int64_t span = (keys.length - 1) * keys.stride + 1;
  const ConstTensorView all = scores.slice(3, keys.start.value(), span);
  Extents shape = all.shape();
  Extents strides = all.strides();
  shape[3] = keys.length;
  strides[3] *= keys.stride;
  return {all.data(), all.dtype(), shape, strides, all.place()};
}

}  // namespace

ScoreTensors block_scores(const RankPlan& plan, const Tile& block, std::int64_t kv_length,
                          const ScoresOfRegion& view) {
  bool by_column = false;
  const auto part = [&](int buffer) -> ConstTensorView {
    if (buffer < 0) return {};
    const ConstTensorView all = view(plan.scores_of(block, buffer));
    if (!plan.buffer(buffer).columns) return all;
    by_column = true;
    if (all.size(3) == 1) return all;
    return all.slice(3, block.columns.begin - plan.buffer(block.key).tokens.begin,
                     block.columns.count);
  };
  const ConstTensorView bias = part(block.bias);
  const ConstTensorView mask = part(block.dense_mask);
  ScoreTensors scores = broadcast_scores(bias, mask,
                                         {block.batches.count, block.heads.count, block.rows.count,
                                          by_column ? block.columns.count : kv_length});
  scores.by_column = by_column;
  return scores;
}

void add_key_copies(const ConstTensorView& scores, const PositionRanges& keys, const TensorView& to,
                    std::vector<TensorCopy>& copies) {
  if (scores.size(3) == 1) {
    copies.push_back({scores, to});
    return;
  }
  std::int64_t key = 0;
  for (const PositionRange& range : keys.ranges()) {
    if (range.length == 0) continue;
    copies.push_back({keys_of(scores, range), to.slice(3, key, range.length)});
    key += range.length;
  }
}

}  // namespace annulus::ring
