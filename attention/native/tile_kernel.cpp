#include "native/tile_kernel.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>

#include <annulus/core/convert.hpp>

#include "native/row_dropout.hpp"

namespace annulus {
namespace {

// Rows of tensors are often too far apart for the hardware to see them coming.
constexpr std::int64_t kAhead = 8;
void prefetch(const void* data, std::int64_t bytes) {
  constexpr std::int64_t kLine = 64;
  for (std::int64_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(static_cast<const std::byte*>(data) + at);
  }
}

}  // namespace

TileKernel::TileKernel(const AttentionProblem& problem, const AttentionBlock& block,
                       const SoftmaxState& result, std::int64_t max_rows, MatrixPath path,
                       MemoryPool& memory)
    : problem_(problem),
      block_(block),
      result_(result),
      visibility_(problem, block),
      value_dim_(block.value.size(3)),
      row_softmax_(static_cast<std::size_t>(max_rows)),
      product_(make_tile_product(path,
                                 {.dtype = problem.dtype,
                                  .rows = max_rows,
                                  .columns = std::min(kTileColumns, block.key.size(1)),
                                  .dim = block.query.size(3),
                                  .value_dim = block.value.size(3),
                                  .scale = problem.logit_scale()},
                                 memory)) {}

void TileKernel::run(const RowTile& tile, const HeadTile& heads,
                     const std::function<void()>& between) {
  const std::int64_t rows = tile.rows.length * heads.count;
  product_->start(rows);
  load_queries(tile, heads);
  std::fill_n(row_softmax_.begin(), rows, RowSoftmax{});
  std::int64_t first_column = 0;
  for (const PositionRange& columns : block_.columns.ranges()) {
    visit(tile, heads, columns, first_column, between);
    first_column += columns.length;
  }
  store(tile, heads);
}

void TileKernel::load_queries(const RowTile& tile, const HeadTile& heads) {
  for (std::int64_t r = 0; r < tile.rows.length; ++r) {
    const std::int64_t ahead = std::min(r + kAhead, tile.rows.length - 1);
    prefetch(block_.query.address({tile.batch, tile.begin.value() + ahead, heads.begin}),
             heads.count * block_.query.size(3) *
                 static_cast<std::int64_t>(size_of(block_.query.dtype())));
    for (std::int64_t h = 0; h < heads.count; ++h) {
      product_->set_query(
          r * heads.count + h,
          block_.query.address({tile.batch, tile.begin.value() + r, heads.begin + h}));
    }
  }
}

void TileKernel::visit(const RowTile& tile, const HeadTile& heads, const PositionRange& columns,
                       std::int64_t first_column, const std::function<void()>& between) {
  const LocalRange seen = visibility_.examine(tile, heads, tile.rows, columns).columns;
  if (seen.count == 0) return;
  visibility_.for_each_run(tile, heads, columns, seen, [&](LocalRange run) {
    visit_run(tile, heads, columns, run, first_column, between);
  });
}

void TileKernel::visit_run(const RowTile& tile, const HeadTile& heads, const PositionRange& columns,
                           LocalRange run, std::int64_t first_column,
                           const std::function<void()>& between) {
  const std::int64_t end = run.end().value();
  for (std::int64_t begin = run.begin.value(); begin < end; begin += kTileColumns) {
    const PositionRange piece = columns.slice(begin, std::min(kTileColumns, end - begin));
    const Visibility seen = visibility_.examine(tile, heads, tile.rows, piece);
    if (seen.empty()) continue;
    const std::int64_t skipped = seen.columns.begin.value();
    const PositionRange visible = piece.slice(skipped, seen.columns.count);
    const std::int64_t first_visible = first_column + begin + skipped;
    const ShownColumns shown = visibility_.shown_by_scores(
        tile, heads, seen.rows, block_.scores.keys_of(first_visible, visible));
    if (shown.empty()) continue;
    multiply(tile, heads, seen.rows, visible.slice(shown.begin, shown.end - shown.begin),
             first_visible + shown.begin, seen.full, shown.all);
    between();
  }
}

void TileKernel::multiply(const RowTile& tile, const HeadTile& heads, LocalRange rows,
                          const PositionRange& columns, std::int64_t first_column, bool full,
                          bool shown) {
  const auto rows_of = [&](const ConstTensorView& tensor) {
    return TensorRows{&tensor, tile.batch, heads.kv_head, first_column, columns.length};
  };
  product_->load_keys(rows_of(block_.key));
  product_->load_values(rows_of(block_.value), !full || !block_.scores.empty());
  const std::int64_t end = rows.end().value() * heads.count;
  Strip strip;
  for (strip.end = rows.begin.value() * heads.count; strip.end < end;) {
    strip.begin = strip.end;
    strip.end = std::min(strip.begin + product_->strip_rows(!full || !shown), end);
    const std::int64_t first_row = strip.begin / heads.count;
    const std::int64_t row_count = (strip.end - 1) / heads.count + 1 - first_row;
    LocalRange seen{LocalPosition(0), columns.length};
    bool strip_full = full;
    bool strip_shown = shown;
    if (!full) {
      const Visibility visible =
          visibility_.examine(tile, heads, tile.rows.slice(first_row, row_count), columns);
      if (visible.empty()) continue;
      seen = visible.columns;
      strip_full = visible.full;
    }
    if (!shown) {
      const std::int64_t begin = seen.begin.value();
      const ShownColumns by_scores = visibility_.shown_by_scores(
          tile, heads, {LocalPosition(first_row), row_count},
          block_.scores.keys_of(first_column + begin, columns.slice(begin, seen.count)));
      if (by_scores.empty()) continue;
      seen = {LocalPosition(begin + by_scores.begin), by_scores.end - by_scores.begin};
      strip_shown = by_scores.all;
    }
    strip.first_column = seen.begin.value() / kRowAlignment * kRowAlignment;
    strip.columns = seen.end().value() - strip.first_column;
    if (strip.columns > seen.count) {  // alignment has added hidden ones
      strip_full = full;
      strip_shown = shown;
    }
    product_->multiply_keys(strip);
    softmax(tile, heads, strip, columns.slice(strip.first_column, strip.columns),
            first_column + strip.first_column, strip_full, strip_shown);
    product_->multiply_values(strip);
    if (!product_->poisoned().empty()) add_poison(tile, heads, strip, columns, first_column);
  }
}

void TileKernel::add_poison(const RowTile& tile, const HeadTile& heads, Strip strip,
                            const PositionRange& columns, std::int64_t first_column) {
  std::vector<float> value(static_cast<std::size_t>(value_dim_));
  for (const std::int64_t c : product_->poisoned()) {
    if (c < strip.first_column || c >= strip.first_column + strip.columns) continue;  // hidden
    to_float32(block_.value.address({tile.batch, first_column + c, heads.kv_head}),
               block_.value.dtype(), value.data(), value_dim_);
    for (std::int64_t index = strip.begin; index < strip.end; ++index) {
      if (!block_.unmasked &&
          !problem_.mask.visible(block_.first_batch + tile.batch,
                                 block_.first_head + heads.begin + index % heads.count,
                                 tile.rows.at(index / heads.count), columns.at(c))) {
        continue;
      }
      if (!block_.scores.shows(tile.batch, heads.begin + index % heads.count,
                               tile.begin.value() + index / heads.count,
                               block_.scores.key_of(first_column + c, columns.at(c)))) {
        continue;
      }
      const float weight = product_->weight(index, c);
      float* const sum = product_->accumulator(index);
      for (std::int64_t d = 0; d < value_dim_; ++d) {
        const float v = value[static_cast<std::size_t>(d)];
        if (product_->leaves_out(v)) sum[d] += weight * v;
      }
    }
  }
}

void TileKernel::softmax(const RowTile& tile, const HeadTile& heads, Strip strip,
                         const PositionRange& columns, std::int64_t first_column, bool full,
                         bool shown) {
  const std::int64_t batch = block_.first_batch + tile.batch;
  const std::span<const std::int32_t> column_ids = problem_.mask.kv_segments(batch);
  for (std::int64_t index = strip.begin; index < strip.end;) {
    const std::int64_t r = index / heads.count;
    const GlobalPosition row = tile.rows.at(r);
    const RowSight sight = visibility_.sight(tile.batch, row, columns, full);
    const LocalRange& seen = sight.seen;
    const LocalRange& gap = sight.gap;
    const std::int64_t begin = seen.begin.value();
    const std::int64_t local_row = tile.begin.value() + r;
    const auto sees = [&](std::int64_t head) {
      if (!sight.by_segment && block_.scores.empty()) return seen.count > 0;
      for (std::int64_t i = begin; i < begin + seen.count; ++i) {
        if (i >= gap.begin.value() && i < gap.end().value()) continue;
        const GlobalPosition column = columns.at(i);
        if (sight.by_segment && column_ids[static_cast<std::size_t>(column.value())] != sight.id)
          continue;
        const std::int64_t key = block_.scores.key_of(first_column + i, column);
        if (block_.scores.shows(tile.batch, head, local_row, key)) return true;
      }
      return false;
    };
    // The strip may hold only some of the row's heads.
    const std::int64_t end = std::min((r + 1) * heads.count, strip.end);
    for (; index < end; ++index) {
      float* const logits = product_->logits(index);
      const WeightRow weights = product_->weights(index);
      float factor = product_->factor();
      std::optional<float> largest;
      if (problem_.soft_cap) {
        largest = cap_row(logits, columns.length, factor, static_cast<float>(*problem_.soft_cap),
                          problem_.dtype != DType::bfloat16);
        if (seen.count < columns.length) largest.reset();
        factor = 1;
      }
      const std::int64_t head = heads.begin + index - r * heads.count;
      bool any = seen.count > 0;
      const auto leave = [&](const SeenLogits& left) {
        any = left.any;
        largest = left.largest;
      };
      // Data of the next row is fetched a bit at a time: its bias, which lies far away, or else its
      // logits, since a strip's logits do not fit the level-1 cache.
      const float* next = product_->logits(std::min(index + 1, strip.end - 1)) + begin;
      if (any && (block_.scores.bias || !shown)) {
        const ScoreTensors::Keys keys =
            block_.scores.keys_of(first_column + begin, columns.slice(begin, seen.count));
        if (block_.scores.bias) {
          const std::int64_t next_row = local_row + (index + heads.count < strip.end ? 1 : 0);
          next = static_cast<const float*>(
              block_.scores.bias->address({tile.batch, head, next_row, keys.first}));
        }
        leave(visibility_.apply_scores(tile.batch, head, local_row, keys, shown, factor,
                                       logits + begin, next));
        if (block_.scores.bias) factor = 1;
      }
      if (sight.by_segment && any) {
        const auto* ids = column_ids.data() + columns.at(begin).value();
        leave(hide_other_ids(ids, columns.stride, seen.count, sight.id, logits + begin));
      }
      if (gap.count > 0) {
        std::fill_n(logits + gap.begin.value(), gap.count, -std::numeric_limits<float>::infinity());
        largest.reset();
      }
      RowSoftmax& row_softmax = row_softmax_[static_cast<std::size_t>(index)];
      const float rescale =
          softmax_row(logits, columns.length, begin, any ? begin + seen.count : begin, factor,
                      weights, row_softmax, next, largest);
      if (any && row_softmax.sum == 0 && !row_softmax.sees) row_softmax.sees = sees(head);
      if (problem_.dropout && problem_.dropout->threshold() > 0 && any) {
        drop_row(*problem_.dropout, batch, block_.first_head + head, row,
                 columns.slice(begin, seen.count), weights.from(begin));
      }
      if (rescale != 1.0F) {
        float* const sum = product_->accumulator(index);
        scale_row(sum, value_dim_, rescale, sum);
      }
    }
  }
}

void TileKernel::store(const RowTile& tile, const HeadTile& heads) {
  const RowSoftmax* softmax = row_softmax_.data();
  const double keep_scale = problem_.dropout ? problem_.dropout->keep_scale() : 1.0;
  for (std::int64_t r = 0; r < tile.rows.length; ++r) {
    const std::int64_t row = tile.begin.value() + r;
    const std::int64_t ahead = tile.begin.value() + std::min(r + kAhead, tile.rows.length - 1);
    prefetch(result_.output.address({tile.batch, ahead, heads.begin}),
             heads.count * value_dim_ * static_cast<std::int64_t>(sizeof(float)));
    for (std::int64_t h = 0; h < heads.count; ++h, ++softmax) {
      const std::int64_t head = heads.begin + h;
      const float* const accumulator = product_->accumulator(r * heads.count + h);
      auto* output = static_cast<float*>(result_.output.address({tile.batch, row, head}));
      const bool empty = softmax->sum == 0;
      // An empty row has an accumulator of zeros; a row whose keys all lack weight is 0/0.
      const double inverse = empty && !softmax->sees ? 0.0 : keep_scale / softmax->sum;
      scale_row(accumulator, value_dim_, static_cast<float>(inverse), output);
      // log(0) = −∞ is the empty element.
      result_.set_lse_at(tile.batch, head, row,
                         empty ? std::log(0.0) : softmax->max + std::log(softmax->sum));
      if (result_.wants_maximum()) {
        result_.maximum.at<float>({tile.batch, head, row}) =
            std::isnan(softmax->sum) ? std::numeric_limits<float>::quiet_NaN() : softmax->max;
      }
    }
  }
}

}  // namespace annulus
