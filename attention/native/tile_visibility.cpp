#include "native/tile_visibility.hpp"

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "mask/visible_part.hpp"

namespace annulus {

Visibility TileVisibility::examine(const RowTile& tile, const HeadTile& heads,
                                   const PositionRange& rows, const PositionRange& columns) const {
  if (!block_.unmasked) {
    return problem_.mask.examine_head(block_.first_batch + tile.batch,
                                      block_.first_head + heads.begin, rows, columns);
  }
  return {rows.length * columns.length,
          true,
          true,
          {LocalPosition(0), rows.length},
          {LocalPosition(0), columns.length}};
}

RowSight TileVisibility::sight(std::int64_t batch, GlobalPosition row, const PositionRange& columns,
                               bool full) const {
  RowSight sight{.seen = {LocalPosition(0), columns.length}};
  if (full) return sight;
  const Mask& mask = problem_.mask;
  const std::span<const std::int32_t> ids = mask.query_segments(block_.first_batch + batch);
  if (!ids.empty()) {
    sight.by_segment = true;
    sight.id = ids[static_cast<std::size_t>(row.value())];
  }
  if (sight.id < 0) {
    sight.seen.count = 0;  // padding sees nothing, not even padding
    return sight;
  }
  const auto [opening, rest] = mask.row_intervals(block_.first_batch + batch, row);
  const LocalRange first = columns.indices_within(opening.begin, opening.end);
  const LocalRange second = columns.indices_within(rest.begin, rest.end);
  sight.seen = hull(first, second);
  if (first.count > 0 && second.count > 0) {
    sight.gap = {first.end(), second.begin - first.end()};
  }
  return sight;
}

ShownColumns TileVisibility::shown_by_scores(const RowTile& tile, const HeadTile& heads,
                                             LocalRange rows,
                                             const ScoreTensors::Keys& keys) const {
  ShownColumns shown{0, keys.count, true};
  const auto any = [&]<class Entry>(const ConstTensorView& tensor,
                                    std::type_identity<Entry> /*type*/) {
    const std::int64_t different = tensor.stride(1) == 0 ? 1 : heads.count;
    for (std::int64_t h = 0; h < different; ++h) {
      for (std::int64_t r = rows.begin.value(); r < rows.end().value(); ++r) {
        const auto* const row = static_cast<const Entry*>(
            tensor.address({tile.batch, heads.begin + h, tile.begin.value() + r, keys.first}));
        if (shows_any(row, tensor.stride(3) * keys.step, keys.count)) return true;
      }
    }
    return false;
  };
  if (block_.scores.bias && !any(*block_.scores.bias, std::type_identity<float>())) return {};
  if (!block_.scores.mask) return shown;
  const ConstTensorView& mask = *block_.scores.mask;
  if (mask.stride(3) * keys.step != 1) {
    shown.all = false;
    return any(mask, std::type_identity<std::uint8_t>()) ? shown : ShownColumns{};
  }
  shown = {keys.count, 0, true};
  const std::int64_t different = mask.stride(1) == 0 ? 1 : heads.count;
  for (std::int64_t h = 0; h < different; ++h) {
    const ShownColumns in_head = shown_columns(
        static_cast<const std::uint8_t*>(mask.address(
            {tile.batch, heads.begin + h, (tile.begin + rows.begin.value()).value(), keys.first})),
        mask.stride(2), rows.count, keys.count);
    shown = {std::min(shown.begin, in_head.begin), std::max(shown.end, in_head.end),
             shown.all && in_head.all};
  }
  return shown;
}

SeenLogits TileVisibility::apply_scores(std::int64_t batch, std::int64_t head, std::int64_t row,
                                        const ScoreTensors::Keys& keys, bool shown, float factor,
                                        float* logits, const float* next) const {
  const ScoreTensors& scores = block_.scores;
  const auto first = [&](const ConstTensorView& tensor) {
    return tensor.address({batch, head, row, keys.first});
  };
  const auto stride = [&](const ConstTensorView& tensor) { return tensor.stride(3) * keys.step; };
  SeenLogits left{.any = true};
  if (scores.bias) {
    left = add_bias_row(static_cast<const float*>(first(*scores.bias)), stride(*scores.bias),
                        keys.count, factor, logits, next);
  }
  if (!shown && left.any) {
    left = hide_row(static_cast<const std::uint8_t*>(first(*scores.mask)), stride(*scores.mask),
                    keys.count, logits);
  }
  return left;
}

}  // namespace annulus
