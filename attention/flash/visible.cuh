#pragma once

#include "flash/result.cuh"
#include "flash/softmax.cuh"

// Tests of what masked segments show to a row of an item.
namespace annulus::flash {

/// Columns of a segment; none if last < first.
struct ColumnSpan {
  std::int32_t first;
  std::int32_t last;
};

/// The index of an item's first row in arrays that have an entry for each row, in each batch with
/// lists.
__device__ __forceinline__ std::int64_t first_row_of(const Arguments& a, const Item& item) {
  return (a.batch_has_list ? static_cast<std::int64_t>(item.batch) * a.rows : 0) +
         item.tile.first_row;
}

/// The ids of the columns of a segment.
__device__ __forceinline__ const std::int32_t* column_ids_of(const Arguments& a, const Item& item,
                                                             const KeySegment& segment) {
  return a.column_ids + segment.first_column +
         (a.batch_has_list ? static_cast<std::int64_t>(item.batch) * a.columns : 0);
}

/// The id of row r; of padding and past the tile's rows one that no column has.
__device__ __forceinline__ std::int32_t row_id_of(const Arguments& a, const Item& item,
                                                  std::int32_t r) {
  constexpr std::int32_t kPadding = -2;
  const std::int32_t id = r < item.tile.rows ? a.row_ids[first_row_of(a, item) + r] : kPadding;
  return id < 0 ? kPadding : id;
}

/// The keys of a masked segment that positions and documents show to the row at this place of
/// Arguments::row_keys.
__device__ __forceinline__ Document row_keys_of(const Arguments& a, const KeySegment& segment,
                                                std::int64_t row_at) {
  const RowKeys& keys = a.row_keys[row_at];
  return (segment.flags & KeySegment::kOpening) != 0 ? keys.opening : keys.rest;
}

/// The columns of a masked segment that row r may see, apart from ids.
__device__ __forceinline__ ColumnSpan visible_columns(const Arguments& a, const Item& item,
                                                      const KeySegment& segment, std::int32_t r) {
  const auto ceil_divide = [](std::int32_t x, std::int32_t y) {
    const std::int32_t quotient = x / y;
    return quotient + (quotient * y < x ? 1 : 0);
  };
  std::int32_t low = segment.low + item.tile.row_stride * r;
  std::int32_t high = segment.high + item.tile.row_stride * r;
  if (a.row_keys != nullptr) {
    const Document keys =
        r < item.tile.rows ? row_keys_of(a, segment, first_row_of(a, item) + r) : Document{};
    low = max(low, keys.begin - segment.start);
    high = min(high, keys.end - 1 - segment.start);
  }
  if (segment.stride != 1) {
    low = ceil_divide(low, segment.stride);
    high = -ceil_divide(-high, segment.stride);
  }
  return {low, min(high, segment.columns - 1)};
}

/// The key of bias and dense mask at a column of a segment.
__device__ __forceinline__ std::int64_t score_key(const Arguments& a, const KeySegment& segment,
                                                  std::int32_t column) {
  return a.scores.key_of(segment.first_column + column,
                         segment.start + std::int64_t{segment.stride} * column);
}

/// True if dense mask and bias leave a pair visible. `row` is a local index.
__device__ __forceinline__ bool scores_show(const Arguments& a, const Item& item, std::int32_t row,
                                            std::int64_t key) {
  const auto& bias = a.scores.bias;
  const auto& mask = a.scores.mask;
  if (mask.data != nullptr && mask.row(item.batch, item.head, row)[key * mask.strides[3]] == 0) {
    return false;
  }
  return bias.data == nullptr ||
         bias.row(item.batch, item.head, row)[key * bias.strides[3]] != -kInfinity;
}

/// True if row r sees any column.
__device__ __forceinline__ bool sees_a_column(const Arguments& a, const Item& item,
                                              std::int32_t r) {
  if (r >= item.tile.live_rows) return false;
  const bool scores = a.scores.bias.data != nullptr || a.scores.mask.data != nullptr;
  for (std::int32_t s = 0; s < item.tile.segments; ++s) {
    const KeySegment& segment = a.segments[item.tile.first_segment + s];
    const bool masked = (segment.flags & KeySegment::kMasked) != 0;
    const ColumnSpan span = masked ? visible_columns(a, item, segment, r)
                                   : ColumnSpan{0, segment.tiles * a.tile_columns - 1};
    const bool ids = masked && a.row_ids != nullptr;
    if (!ids && !scores && max(span.first, 0) <= span.last) return true;
    if (!ids && !scores) continue;
    const std::int32_t id = ids ? row_id_of(a, item, r) : 0;
    const std::int32_t* const column_ids = ids ? column_ids_of(a, item, segment) : nullptr;
    for (std::int32_t c = max(span.first, 0); c <= span.last; ++c) {
      if (ids && column_ids[c] != id) continue;
      if (!scores || scores_show(a, item, item.tile.first_row + r, score_key(a, segment, c))) {
        return true;
      }
    }
  }
  return false;
}

/// True if row r, whose weights sum to 0, saw keys nevertheless, in this call or in the state:
/// their logits were all −∞, and its output is NaN. The output of a row that saw no key is 0. See
/// SoftmaxState. `shown`: whether dense mask and bias may have left it anything in this call.
__device__ __forceinline__ bool saw_without_weight(const Arguments& a, const Item& item,
                                                   std::int32_t r, bool shown = true) {
  if (r >= item.tile.rows) return false;
  if (a.state.output != nullptr &&
      isnan(
          static_cast<const float*>(a.state.output)[output_offset(a.state, result_row(item, r))])) {
    return true;
  }
  return shown && sees_a_column(a, item, r);
}

}  // namespace annulus::flash
