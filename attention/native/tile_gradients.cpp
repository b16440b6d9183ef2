#include "native/tile_gradients.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include <cblas.h>

#include <annulus/core/convert.hpp>

#include "native/all_finite.hpp"
#include "native/row_dropout.hpp"
#include "native/row_gradients.hpp"
#include "native/row_scores.hpp"
#include "native/row_softmax.hpp"

namespace annulus {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// Rows are longer than a tile, so that they do not all map to the same cache set.
constexpr std::int64_t kGradientStride = kGradientColumns + kRowAlignment;

struct Factor {
  const float* data;
  std::int64_t stride;
  bool transposed = false;
};

// product = left · right, or product += left · right if `add`.
void multiply(std::int64_t rows, std::int64_t columns, std::int64_t depth, Factor left,
              Factor right, bool add, float* product, std::int64_t stride, float factor = 1) {
  const auto blas = [](std::int64_t size) { return static_cast<blasint>(size); };
  const auto order = [](bool transposed) { return transposed ? CblasTrans : CblasNoTrans; };
  cblas_sgemm(CblasRowMajor, order(left.transposed), order(right.transposed), blas(rows),
              blas(columns), blas(depth), factor, left.data, blas(left.stride), right.data,
              blas(right.stride), add ? 1.0F : 0.0F, product, blas(stride));
}

void add_to(float* sums, const float* terms, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) sums[i] += terms[i];
}

}  // namespace

TileGradients::TileGradients(const AttentionProblem& problem, const BackwardBlock& block,
                             const AttentionBlock& forward, const Gradients& gradients,
                             MatrixPath path, MemoryPool& memory)
    : problem_(problem),
      block_(block),
      gradients_(gradients),
      visibility_(problem, forward),
      dim_(block.query.size(3)),
      value_dim_(block.value.size(3)),
      scale_(static_cast<float>(problem.logit_scale())),
      lse_(static_cast<std::size_t>(kGradientRows)),
      delta_(lse_.size()) {
  const std::int64_t columns = std::min(kGradientColumns, block.key.size(1));
  const std::int64_t rows =
      round_up_to_row_alignment(std::min(kGradientRows, block.query.size(1) * block.query.size(2)));
  if (path == MatrixPath::amx) {
    amx_.emplace(AmxGradients::Sizes{problem.dtype, rows, columns, dim_, value_dim_}, memory);
  }
  const std::int64_t matrix = rows * kGradientStride;
  const std::array counts{
      columns * dim_, columns * value_dim_,      columns * dim_,  columns * value_dim_,
      rows * dim_,    rows * value_dim_,         rows * dim_,     matrix,
      matrix,         wants_bias() ? matrix : 0, kGradientStride, kGradientStride};
  const std::array parts{&keys_,    &values_,       &grad_keys_,    &grad_values_,
                         &queries_, &grad_outputs_, &grad_queries_, &weights_,
                         &grads_,   &grad_logits_,  &slopes_,       &keep_};
  std::int64_t total = 0;
  for (const std::int64_t count : counts) total += round_up_to_row_alignment(count);
  workspace_ =
      memory.allocate(static_cast<std::size_t>(total) * sizeof(float), "the workspace of native");
  auto* next = static_cast<float*>(workspace_.data());
  std::fill_n(next, total, 0.0F);  // computations read the padding, too
  for (std::size_t i = 0; i < std::size(counts); ++i) {
    *parts[i] = next;
    next += round_up_to_row_alignment(counts[i]);
  }
}

void TileGradients::start(const ColumnTile& columns) {
  columns_ = columns;
  const std::int64_t count = columns.columns.length;
  for (std::int64_t j = 0; j < count; ++j) {
    const std::int64_t row = columns.begin + j;
    to_float32(block_.key.address({columns.batch, row, columns.kv_head}), problem_.dtype,
               keys_ + j * dim_, dim_);
    to_float32(block_.value.address({columns.batch, row, columns.kv_head}), problem_.dtype,
               values_ + j * value_dim_, value_dim_);
  }
  finite_columns_ = all_finite(keys_, count * dim_) && all_finite(values_, count * value_dim_);
  std::fill_n(grad_keys_, count * dim_, 0.0F);
  std::fill_n(grad_values_, count * value_dim_, 0.0F);
  amx_columns_ = amx_ && amx_->set_columns(keys_, values_, count);
}

bool TileGradients::take(const RowTile& tile, const HeadTile& heads) {
  if (!find_pairs(tile, heads)) return false;
  load_rows();
  amx_rows_ = amx_columns_ && amx_->set_rows(queries_, grad_outputs_, pairs_.stacked());
  multiply_operands();
  const bool hides = !pairs_.full || !block_.scores.empty() || empty_rows_;
  if (hides && !(finite_columns_ && finite_rows_)) {
    take_pair_by_pair();
  } else {
    differentiate();
    multiply_gradients();
  }
  return true;
}

bool TileGradients::find_pairs(const RowTile& tile, const HeadTile& heads) {
  const Visibility seen = visibility_.examine(tile, heads, tile.rows, columns_.columns);
  if (seen.empty()) return false;
  const std::int64_t begin = seen.columns.begin.value();
  const PositionRange columns = columns_.columns.slice(begin, seen.columns.count);
  const ShownColumns shown = visibility_.shown_by_scores(
      tile, heads, seen.rows, block_.scores.keys_of(columns_.begin + begin, columns));
  if (shown.empty()) return false;
  const std::int64_t end = begin + shown.end;
  // AMX begins at whole tiles of its own: the mask hides the columns before.
  const std::int64_t unit = amx_columns_ ? amx::kDepth : 1;
  const std::int64_t first = (begin + shown.begin) / unit * unit;
  const bool whole = first == begin + shown.begin;
  pairs_ = {tile,
            heads,
            seen.rows.begin.value(),
            seen.rows.count,
            first,
            columns_.columns.slice(first, end - first),
            seen.full && whole,
            shown.all && (whole || !block_.scores.mask)};
  return true;
}

void TileGradients::load_rows() {
  empty_rows_ = false;
  finite_rows_ = true;
  const std::int64_t batch = pairs_.tile.batch;
  for (std::int64_t index = 0; index < pairs_.stacked(); ++index) {
    const std::int64_t head = pairs_.head(index);
    const std::int64_t row = pairs_.local_row(index);
    float* const query = queries_ + index * dim_;
    float* const grad_output = grad_outputs_ + index * value_dim_;
    const float lse = block_.lse.at<float>({batch, head, row});
    const float delta = block_.delta.at<float>({batch, head, row});
    lse_[static_cast<std::size_t>(index)] = lse;
    delta_[static_cast<std::size_t>(index)] = delta;
    if (lse == kMinusInfinity) {
      empty_rows_ = true;
      std::fill_n(query, dim_, 0.0F);
      std::fill_n(grad_output, value_dim_, 0.0F);
      continue;
    }
    to_float32(block_.query.address({batch, row, head}), problem_.dtype, query, dim_);
    // BLAS does not read a matrix that it multiplies by 0, but 0 · NaN must be NaN.
    if (scale_ == 0) std::for_each_n(query, dim_, [](float& entry) { entry *= 0; });
    to_float32(block_.grad_output.address({batch, row, head}), problem_.dtype, grad_output,
               value_dim_);
    finite_rows_ = finite_rows_ && std::isfinite(lse) && std::isfinite(delta);
  }
  finite_rows_ = finite_rows_ && all_finite(queries_, pairs_.stacked() * dim_) &&
                 all_finite(grad_outputs_, pairs_.stacked() * value_dim_);
}

void TileGradients::multiply_operands() {
  const std::int64_t rows = pairs_.stacked();
  const std::int64_t columns = pairs_.columns.length;
  const float factor = scale_ == 0 ? 1.0F : scale_;
  const bool wants_grads = wants_query() || wants_key() || wants_bias();
  if (amx_rows_) {
    amx_->multiply_operands({pairs_.column, columns}, factor,
                            {weights_, wants_grads ? grads_ : nullptr, kGradientStride});
    return;
  }
  multiply(rows, columns, dim_, {queries_, dim_}, {keys_ + pairs_.column * dim_, dim_, true}, false,
           weights_, kGradientStride, factor);
  if (!wants_grads) return;
  multiply(rows, columns, value_dim_, {grad_outputs_, value_dim_},
           {values_ + pairs_.column * value_dim_, value_dim_, true}, false, grads_,
           kGradientStride);
}

void TileGradients::differentiate() {
  // Entries of the columns that blocks hide from the whole row tile.
  std::vector<LocalRange> hidden;
  if (!pairs_.full) {
    std::int64_t end = 0;
    const LocalRange all{LocalPosition(0), pairs_.columns.length};
    const auto hide_up_to = [&](std::int64_t begin) {
      if (begin > end) hidden.push_back({LocalPosition(end), begin - end});
    };
    visibility_.for_each_run(pairs_.tile, pairs_.heads, pairs_.columns, all, [&](LocalRange run) {
      hide_up_to(run.begin.value());
      end = run.end().value();
    });
    hide_up_to(all.count);
  }
  for (std::int64_t index = 0; index < pairs_.stacked();) {
    const RowSight sight =
        visibility_.sight(pairs_.tile.batch, pairs_.position(index), pairs_.columns, pairs_.full);
    for (std::int64_t h = 0; h < pairs_.heads.count; ++h) differentiate_row(index++, sight, hidden);
  }
}

void TileGradients::differentiate_row(std::int64_t index, const RowSight& sight,
                                      const std::vector<LocalRange>& hidden) {
  const std::int64_t count = pairs_.columns.length;
  float* const logits = weights_ + index * kGradientStride;
  float* const grads = grads_ + index * kGradientStride;
  float* const grad_logits = wants_bias() ? grad_logits_ + index * kGradientStride : nullptr;
  RowGradient row{.lse = lse_[static_cast<std::size_t>(index)],
                  .delta = delta_[static_cast<std::size_t>(index)],
                  .scale = scale_,
                  .hides = !pairs_.full || !block_.scores.empty()};
  if (row.lse == kMinusInfinity || sight.seen.count == 0) {
    for (float* const entries : {logits, grads, grad_logits}) {
      if (entries != nullptr) std::fill_n(entries, count, 0.0F);
    }
    return;
  }
  if (problem_.soft_cap) {
    const auto cap = static_cast<float>(*problem_.soft_cap);
    slopes_of_cap(logits, count, scale_, cap, slopes_);
    cap_row(logits, count, 1.0F, cap, true);
    row.slopes = slopes_;
  }
  const auto hide = [&](LocalRange range) {
    std::fill_n(logits + range.begin.value(), range.count, kMinusInfinity);
  };
  const std::int64_t batch = pairs_.tile.batch;
  const std::int64_t begin = sight.seen.begin.value();
  const std::int64_t end = sight.seen.end().value();
  const PositionRange seen = pairs_.columns.slice(begin, sight.seen.count);
  if (!block_.scores.empty()) {
    (void)visibility_.apply_scores(
        batch, pairs_.head(index), pairs_.local_row(index),
        block_.scores.keys_of(columns_.begin + pairs_.column + begin, seen), pairs_.shown, 1.0F,
        logits + begin, logits + begin);
  }
  if (sight.by_segment) {
    const auto ids = problem_.mask.kv_segments(block_.first_batch + batch);
    (void)hide_other_ids(ids.data() + seen.start.value(), seen.stride, seen.length, sight.id,
                         logits + begin);
  }
  hide({LocalPosition(0), begin});
  hide({LocalPosition(end), count - end});
  hide(sight.gap);
  for (const LocalRange& range : hidden) hide(range);
  if (problem_.dropout) {
    std::fill_n(keep_, count, static_cast<float>(problem_.dropout->keep_scale()));
    if (problem_.dropout->threshold() > 0) {
      drop_row(*problem_.dropout, block_.first_batch + batch,
               block_.first_head + pairs_.head(index), pairs_.position(index), pairs_.columns,
               {.floats = keep_});
    }
    row.keep = keep_;
  }
  gradient_row(row, count, logits, grads, grad_logits);
}

void TileGradients::multiply_gradients() {
  const std::int64_t rows = pairs_.stacked();
  const std::int64_t columns = pairs_.columns.length;
  if (amx_rows_ &&
      amx_->multiply_gradients({pairs_.column, columns}, {weights_, grads_, kGradientStride},
                               {wants_query(), wants_key(), wants_value()})) {
    if (!wants_query()) return;
    for (std::int64_t index = 0; index < rows; ++index) {
      std::copy_n(amx_->grad_query(index), dim_, grad_queries_ + index * dim_);
    }
    return;
  }
  if (wants_value()) {
    multiply(columns, value_dim_, rows, {weights_, kGradientStride, true},
             {grad_outputs_, value_dim_}, true, grad_values_ + pairs_.column * value_dim_,
             value_dim_);
  }
  if (wants_key()) {
    multiply(columns, dim_, rows, {grads_, kGradientStride, true}, {queries_, dim_}, true,
             grad_keys_ + pairs_.column * dim_, dim_);
  }
  if (wants_query()) {
    multiply(rows, dim_, columns, {grads_, kGradientStride}, {keys_ + pairs_.column * dim_, dim_},
             false, grad_queries_, dim_);
  }
}

bool TileGradients::sees(std::int64_t index, std::int64_t column) const {
  const std::int64_t head = pairs_.head(index);
  const GlobalPosition position = pairs_.columns.at(column);
  return lse_[static_cast<std::size_t>(index)] != kMinusInfinity &&
         (block_.unmasked ||
          problem_.mask.visible(block_.first_batch + pairs_.tile.batch, block_.first_head + head,
                                pairs_.position(index), position)) &&
         block_.scores.shows(
             pairs_.tile.batch, head, pairs_.local_row(index),
             block_.scores.key_of(columns_.begin + pairs_.column + column, position));
}

void TileGradients::take_pair_by_pair() {
  std::fill_n(grad_queries_, pairs_.stacked() * dim_, 0.0F);
  const auto add_product = [](float factor, const float* row, std::int64_t count, float* sums) {
    for (std::int64_t d = 0; d < count; ++d) sums[d] += factor * row[d];
  };
  for (std::int64_t index = 0; index < pairs_.stacked(); ++index) {
    const auto at = static_cast<std::size_t>(index);
    const std::int64_t batch = pairs_.tile.batch;
    const std::int64_t head = pairs_.head(index);
    const std::int64_t row = pairs_.local_row(index);
    for (std::int64_t j = 0; j < pairs_.columns.length; ++j) {
      float grad_logit = 0;
      if (sees(index, j)) {
        const GlobalPosition position = pairs_.columns.at(j);
        const std::int64_t column = pairs_.column + j;
        float logit = weights_[index * kGradientStride + j];
        float slope = scale_;
        if (problem_.soft_cap) {
          const auto cap = static_cast<float>(*problem_.soft_cap);
          const float cosh = std::cosh(logit / cap);
          slope = scale_ / (cosh * cosh);
          logit = cap * std::tanh(logit / cap);
        }
        if (block_.scores.bias) {
          const std::int64_t key = block_.scores.key_of(columns_.begin + column, position);
          logit += block_.scores.bias->at<float>({batch, head, row, key});
        }
        float keep = 1;
        if (problem_.dropout) {
          const bool drops =
              problem_.dropout->drops(block_.first_batch + batch, block_.first_head + head,
                                      pairs_.position(index), position);
          keep = drops ? 0.0F : static_cast<float>(problem_.dropout->keep_scale());
        }
        const float probability = std::exp(logit - lse_[at]);
        grad_logit = probability * (keep * grads_[index * kGradientStride + j] - delta_[at]);
        const float grad = slope * grad_logit;
        add_product(probability * keep, grad_outputs_ + index * value_dim_, value_dim_,
                    grad_values_ + column * value_dim_);
        add_product(grad, queries_ + index * dim_, dim_, grad_keys_ + column * dim_);
        add_product(grad, keys_ + column * dim_, dim_, grad_queries_ + index * dim_);
      }
      if (wants_bias()) grad_logits_[index * kGradientStride + j] = grad_logit;
    }
  }
}

void TileGradients::add_rows() {
  if (wants_query()) {
    for (std::int64_t index = 0; index < pairs_.stacked(); ++index) {
      add_to(static_cast<float*>(gradients_.query.address(
                 {pairs_.tile.batch, pairs_.local_row(index), pairs_.head(index)})),
             grad_queries_ + index * dim_, dim_);
    }
  }
  if (wants_bias()) add_bias_gradients();
}

void TileGradients::add_bias_gradients() const {
  const ScoreTensors::Keys keys =
      block_.scores.keys_of(columns_.begin + pairs_.column, pairs_.columns);
  const std::int64_t stride = gradients_.bias.stride(3) * keys.step;
  for (std::int64_t index = 0; index < pairs_.stacked(); ++index) {
    const float* const terms = grad_logits_ + index * kGradientStride;
    auto* const sums = static_cast<float*>(gradients_.bias.address(
        {pairs_.tile.batch, pairs_.head(index), pairs_.local_row(index), keys.first}));
    if (stride == 1) {
      add_to(sums, terms, keys.count);
    } else if (stride == 0) {
      double sum = 0;
      for (std::int64_t j = 0; j < keys.count; ++j) sum += terms[j];
      *sums += static_cast<float>(sum);
    } else {
      for (std::int64_t j = 0; j < keys.count; ++j) sums[j * stride] += terms[j];
    }
  }
}

void TileGradients::add_columns() {
  if (amx_columns_) amx_->add_sums(columns_.columns.length, grad_keys_, grad_values_);
  const auto add = [&](const TensorView& tensor, const float* terms, std::int64_t dim) {
    for (std::int64_t j = 0; j < columns_.columns.length; ++j) {
      add_to(static_cast<float*>(
                 tensor.address({columns_.batch, columns_.begin + j, columns_.kv_head})),
             terms + j * dim, dim);
    }
  };
  if (wants_key()) add(gradients_.key, grad_keys_, dim_);
  if (wants_value()) add(gradients_.value, grad_values_, value_dim_);
}

}  // namespace annulus
