#include "native/tile_kernel.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>

#include <cblas.h>

#include <annulus/core/convert.hpp>

#include "native/row_dropout.hpp"

namespace annulus {
namespace {

// Rows of logits are a cache line longer than a tile, so that they do not all fall into one set.
constexpr std::int64_t kLogitStride = kTileColumns + kRowAlignment;

constexpr std::int64_t round_up(std::int64_t count) {
  return (count + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

void hide_other_segments(float* logits, std::int64_t count, const std::int32_t* ids,
                         std::int64_t stride, std::int32_t wanted) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  for (std::int64_t i = 0; i < count; ++i) {
    logits[i] = ids[i * stride] == wanted ? logits[i] : kHidden;
  }
}

// Whether no infinity or NaN is among them. Their exponent is all ones, so that adding to it sets
// the sign.
bool all_finite(const float* values, std::int64_t count) {
  constexpr std::uint32_t kExponent = 0x7f800000;
  constexpr std::uint32_t kOne = 0x00800000;
  constexpr std::uint32_t kSign = 0x80000000;
  std::uint32_t any = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    any |= (std::bit_cast<std::uint32_t>(values[i]) & kExponent) + kOne;
  }
  return (any & kSign) == 0;
}

void scale_row(float* row, std::int64_t count, float factor) {
  for (std::int64_t i = 0; i < count; ++i) row[i] *= factor;
}

}  // namespace

TileKernel::TileKernel(const AttentionProblem& problem, const AttentionBlock& block,
                       const SoftmaxState& result, std::int64_t max_rows, MemoryPool& memory)
    : problem_(problem),
      block_(block),
      result_(result),
      dim_(block.query.size(3)),
      value_dim_(block.value.size(3)),
      row_softmax_(static_cast<std::size_t>(max_rows)) {
  const std::int64_t columns = std::min(kTileColumns, block.key.size(1));
  const std::array sizes{max_rows * dim_, max_rows * kLogitStride, max_rows * value_dim_,
                         columns * dim_, columns * value_dim_};
  const std::array parts{&queries_, &logits_, &accumulator_, &keys_, &values_};
  std::int64_t total = 0;
  for (const std::int64_t size : sizes) total += round_up(size);
  workspace_ = memory.allocate(static_cast<std::size_t>(total) * sizeof(float));
  auto* next = static_cast<float*>(workspace_.data());
  for (std::size_t i = 0; i < std::size(sizes); ++i) {
    *parts[i] = next;
    next += round_up(sizes[i]);
  }
}

void TileKernel::run(const RowTile& tile, const HeadTile& heads,
                     const std::function<void()>& between) {
  const std::int64_t rows = tile.rows.length * heads.count;
  load_queries(tile, heads);
  std::fill_n(row_softmax_.begin(), rows, RowSoftmax{});
  std::fill_n(accumulator_, rows * value_dim_, 0.0F);
  std::int64_t first_column = 0;
  for (const PositionRange& columns : block_.columns.ranges()) {
    visit(tile, heads, columns, first_column, between);
    first_column += columns.length;
  }
  store(tile, heads);
}

void TileKernel::load_queries(const RowTile& tile, const HeadTile& heads) {
  float* next = queries_;
  for (std::int64_t r = 0; r < tile.rows.length; ++r) {
    for (std::int64_t h = 0; h < heads.count; ++h, next += dim_) {
      to_float32(block_.query.address({tile.batch, tile.begin.value() + r, heads.begin + h}),
                 block_.query.dtype(), next, dim_);
    }
  }
}

Visibility TileKernel::examine(const RowTile& tile, const HeadTile& heads,
                               const PositionRange& columns) const {
  if (!block_.unmasked) {
    return problem_.mask.examine_head(block_.first_batch + tile.batch,
                                      block_.first_head + heads.begin, tile.rows, columns);
  }
  return {tile.rows.length * columns.length,
          true,
          true,
          {LocalPosition(0), tile.rows.length},
          {LocalPosition(0), columns.length}};
}

void TileKernel::visit(const RowTile& tile, const HeadTile& heads, const PositionRange& columns,
                       std::int64_t first_column, const std::function<void()>& between) {
  const LocalRange seen = examine(tile, heads, columns).columns;
  if (seen.count == 0) return;
  const std::optional<BlockMask>& blocks = problem_.mask.block_mask();
  if (!blocks || block_.unmasked) {
    return visit_run(tile, heads, columns, seen, first_column, between);
  }
  const GlobalPosition end = columns.at(seen.end().value() - 1) + 1;
  for (GlobalPosition from = columns.at(seen.begin.value()); from < end;) {
    const BlockMask::Run run = blocks->next_run(
        block_.first_batch + tile.batch, block_.first_head + heads.begin, tile.rows.start, from);
    if (run.empty()) break;
    visit_run(tile, heads, columns, columns.indices_within(run.begin, std::min(run.end, end)),
              first_column, between);
    from = run.end;
  }
}

void TileKernel::visit_run(const RowTile& tile, const HeadTile& heads, const PositionRange& columns,
                           LocalRange run, std::int64_t first_column,
                           const std::function<void()>& between) {
  const std::int64_t end = run.end().value();
  for (std::int64_t begin = run.begin.value(); begin < end; begin += kTileColumns) {
    const PositionRange piece = columns.slice(begin, std::min(kTileColumns, end - begin));
    const Visibility seen = examine(tile, heads, piece);
    if (seen.empty()) continue;
    const std::int64_t skipped = seen.columns.begin.value();
    multiply(tile, heads, seen.rows, piece.slice(skipped, seen.columns.count),
             first_column + begin + skipped, seen.full);
    between();
  }
}

TileKernel::Operand TileKernel::load(const ConstTensorView& tensor, std::int64_t batch,
                                     std::int64_t head, std::int64_t begin, std::int64_t count,
                                     float* workspace) {
  const std::int64_t dim = tensor.size(3);
  const std::int64_t stride = tensor.stride(1);
  const void* first = tensor.address({batch, begin, head});
  const bool usable = stride >= dim && stride <= std::numeric_limits<blasint>::max();
  if (tensor.dtype() == DType::float32 && usable) return {static_cast<const float*>(first), stride};
  if (stride == dim) {
    to_float32(first, tensor.dtype(), workspace, count * dim);
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      to_float32(tensor.address({batch, begin + i, head}), tensor.dtype(), workspace + i * dim,
                 dim);
    }
  }
  return {workspace, dim};
}

void TileKernel::multiply(const RowTile& tile, const HeadTile& heads, LocalRange rows,
                          const PositionRange& columns, std::int64_t first_column, bool full) {
  const auto blas = [](std::int64_t size) { return static_cast<blasint>(size); };
  const std::int64_t first = rows.begin.value() * heads.count;
  const std::int64_t count = rows.count * heads.count;
  const Operand keys =
      load(block_.key, tile.batch, heads.kv_head, first_column, columns.length, keys_);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, blas(count), blas(columns.length),
              blas(dim_), static_cast<float>(problem_.logit_scale()), queries_ + first * dim_,
              blas(dim_), keys.data, blas(keys.stride), 0.0F, logits_ + first * kLogitStride,
              blas(kLogitStride));
  softmax(tile, heads, rows, columns, full);
  Operand values =
      load(block_.value, tile.batch, heads.kv_head, first_column, columns.length, values_);
  // A product makes 0 · NaN a NaN, also in rows that do not see the key.
  if (!full) values = without_poison(values, columns.length);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, blas(count), blas(value_dim_),
              blas(columns.length), 1.0F, logits_ + first * kLogitStride, blas(kLogitStride),
              values.data, blas(values.stride), 1.0F, accumulator_ + first * value_dim_,
              blas(value_dim_));
  if (!full && !poisoned_.empty()) add_poison(tile, heads, rows, columns, first_column);
}

TileKernel::Operand TileKernel::without_poison(Operand values, std::int64_t columns) {
  poisoned_.clear();
  if (values.stride == value_dim_ && all_finite(values.data, columns * value_dim_)) return values;
  for (std::int64_t c = 0; c < columns; ++c) {
    if (!all_finite(values.data + c * values.stride, value_dim_)) poisoned_.push_back(c);
  }
  if (poisoned_.empty()) return values;
  if (values.data != values_) {
    for (std::int64_t c = 0; c < columns; ++c) {
      std::copy_n(values.data + c * values.stride, value_dim_, values_ + c * value_dim_);
    }
  }
  for (const std::int64_t c : poisoned_) {
    for (float* v = values_ + c * value_dim_; v != values_ + (c + 1) * value_dim_; ++v) {
      if (!std::isfinite(*v)) *v = 0.0F;
    }
  }
  return {values_, value_dim_};
}

void TileKernel::add_poison(const RowTile& tile, const HeadTile& heads, LocalRange rows,
                            const PositionRange& columns, std::int64_t first_column) {
  std::vector<float> value(static_cast<std::size_t>(value_dim_));
  for (const std::int64_t c : poisoned_) {
    to_float32(block_.value.address({tile.batch, first_column + c, heads.kv_head}),
               block_.value.dtype(), value.data(), value_dim_);
    for (std::int64_t r = rows.begin.value(); r < rows.end().value(); ++r) {
      for (std::int64_t h = 0; h < heads.count; ++h) {
        if (!problem_.mask.visible(block_.first_batch + tile.batch,
                                   block_.first_head + heads.begin + h, tile.rows.at(r),
                                   columns.at(c))) {
          continue;
        }
        const std::int64_t index = r * heads.count + h;
        const float weight = logits_[index * kLogitStride + c];
        float* const sum = accumulator_ + index * value_dim_;
        for (std::int64_t d = 0; d < value_dim_; ++d) {
          const float v = value[static_cast<std::size_t>(d)];
          if (!std::isfinite(v)) sum[d] += weight * v;
        }
      }
    }
  }
}

void TileKernel::softmax(const RowTile& tile, const HeadTile& heads, LocalRange rows,
                         const PositionRange& columns, bool full) {
  const Mask& mask = problem_.mask;
  const std::int64_t batch = block_.first_batch + tile.batch;
  const std::span<const std::int32_t> row_ids = mask.query_segments(batch);
  const std::span<const std::int32_t> column_ids = mask.kv_segments(batch);
  for (std::int64_t r = rows.begin.value(); r < rows.end().value(); ++r) {
    const GlobalPosition row = tile.rows.at(r);
    LocalRange seen{LocalPosition(0), columns.length};
    const std::int32_t id = row_ids.empty() ? 0 : row_ids[static_cast<std::size_t>(row.value())];
    if (!full) {
      const Mask::Interval interval = mask.row_interval(batch, row);
      seen = columns.indices_within(interval.begin, interval.end);
      if (id < 0) seen.count = 0;  // padding sees nothing, not even padding
    }
    const std::int64_t begin = seen.begin.value();
    const auto sees = [&] {
      if (full || row_ids.empty()) return seen.count > 0;
      for (std::int64_t i = begin; i < begin + seen.count; ++i) {
        if (column_ids[static_cast<std::size_t>(columns.at(i).value())] == id) return true;
      }
      return false;
    };
    for (std::int64_t h = 0; h < heads.count; ++h) {
      const std::int64_t index = r * heads.count + h;
      float* logits = logits_ + index * kLogitStride;
      if (problem_.soft_cap) {
        cap_row(logits, columns.length, static_cast<float>(*problem_.soft_cap));
      }
      if (!full && !row_ids.empty() && seen.count > 0) {
        const auto* ids = column_ids.data() + columns.at(begin).value();
        hide_other_segments(logits + begin, seen.count, ids, columns.stride, id);
      }
      RowSoftmax& row_softmax = row_softmax_[static_cast<std::size_t>(index)];
      const float rescale =
          softmax_row(logits, columns.length, begin, begin + seen.count, row_softmax);
      if (row_softmax.sum == 0 && !row_softmax.sees) row_softmax.sees = sees();
      if (problem_.dropout && problem_.dropout->threshold() > 0 && seen.count > 0) {
        drop_row(*problem_.dropout, batch, block_.first_head + heads.begin + h, row,
                 columns.slice(begin, seen.count), logits + begin);
      }
      if (rescale != 1.0F) scale_row(accumulator_ + index * value_dim_, value_dim_, rescale);
    }
  }
}

void TileKernel::store(const RowTile& tile, const HeadTile& heads) {
  const float* accumulator = accumulator_;
  const RowSoftmax* softmax = row_softmax_.data();
  const double keep_scale = problem_.dropout ? problem_.dropout->keep_scale() : 1.0;
  for (std::int64_t r = 0; r < tile.rows.length; ++r) {
    const std::int64_t row = tile.begin.value() + r;
    for (std::int64_t h = 0; h < heads.count; ++h, accumulator += value_dim_, ++softmax) {
      const std::int64_t head = heads.begin + h;
      auto* output = static_cast<float*>(result_.output.address({tile.batch, row, head}));
      const bool empty = softmax->sum == 0;
      // An empty row has an accumulator of zeros; a row whose keys all lack weight is 0/0.
      const double inverse = empty && !softmax->sees ? 0.0 : keep_scale / softmax->sum;
      for (std::int64_t d = 0; d < value_dim_; ++d) {
        output[d] = static_cast<float>(accumulator[d] * inverse);
      }
      // log(0) = −∞ is the empty element.
      result_.set_lse_at(tile.batch, head, row,
                         empty ? std::log(0.0) : softmax->max + std::log(softmax->sum));
    }
  }
}

}  // namespace annulus
