#include "native/amx_gradients.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "native/amx_parts.hpp"

namespace annulus {
namespace {

using amx::clear;
using amx::from;
using amx::kColumns;
using amx::kDepth;
using Bits = std::uint16_t;

constexpr std::int64_t padded(std::int64_t count) {
  return (count + kDepth - 1) / kDepth * kDepth;
}

// Longer than a row, so that rows do not all map to the same cache set.
constexpr std::int64_t stride_of(std::int64_t count) {
  return padded(count) + kDepth;
}

// True if entries that are lost, being below 2⁻¹⁰⁰, are nothing beside the largest.
bool lost_entries_are_negligible(const float* entries, std::int64_t count) {
  constexpr float kLarge = 0x1p-70F;
  float largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(entries[i])) return false;
    largest = std::max(largest, std::abs(entries[i]));
  }
  return largest >= kLarge;
}

}  // namespace

AmxGradients::AmxGradients(const Sizes& sizes, MemoryPool& memory)
    : sizes_(sizes),
      parts_(amx::parts_of(sizes.dtype)),
      dim_(padded(sizes.dim)),
      value_dim_(padded(sizes.value_dim)) {
  const std::int64_t rows = padded(sizes.rows);
  const std::int64_t columns = padded(sizes.columns);
  const std::int64_t largest = std::max(dim_, value_dim_);
  workspace_ = amx::allocate(memory, parts_,
                             {{&queries_, rows * dim_},
                              {&grad_outputs_, rows * value_dim_},
                              {&queries_by_dim_, dim_ * stride_of(rows)},
                              {&grad_outputs_by_dim_, value_dim_ * stride_of(rows)},
                              {&keys_by_dim_, columns * dim_},
                              {&values_by_dim_, columns * value_dim_},
                              {&keys_, columns * dim_},
                              {&split_, std::max(rows * stride_of(columns), columns * largest)},
                              {&packed_, rows * columns}},
                             {{&grad_queries_, rows * dim_},
                              {&grad_keys_, dim_ * stride_of(columns)},
                              {&grad_values_, value_dim_ * stride_of(columns)},
                              {&product_, largest * stride_of(columns)}});
}

// Rows up to a multiple of kDepth, and entries up to `padded_dim`, become 0.
bool AmxGradients::split_rows(const float* rows, std::int64_t count, std::int64_t dim,
                              std::int64_t padded_dim, const amx::Parts& to) const {
  bool good = true;
  for (std::int64_t i = 0; i < count; ++i) {
    const amx::Parts row = from(to, i * padded_dim);
    good = amx::split(rows + i * dim, dim, row) && good;
    clear(from(row, dim), padded_dim - dim);
  }
  clear(from(to, count * padded_dim), (padded(count) - count) * padded_dim);
  return good;
}

bool AmxGradients::set_columns(const float* keys, const float* values, std::int64_t count) {
  std::fill_n(grad_keys_, dim_ * stride_of(sizes_.columns), 0.0F);
  std::fill_n(grad_values_, value_dim_ * stride_of(sizes_.columns), 0.0F);
  const auto pack_by_dim = [&](std::int64_t dim, const amx::Parts& to) {
    for (int part = 0; part < parts_; ++part) {
      for (std::int64_t row = 0; row < padded(count); row += kColumns) {
        amx::pack_transposed(split_.of[part] + row * dim, dim, dim, to.of[part] + row * dim);
      }
    }
  };
  if (!split_rows(values, count, sizes_.value_dim, value_dim_, split_)) return false;
  pack_by_dim(value_dim_, values_by_dim_);
  if (!split_rows(keys, count, sizes_.dim, dim_, split_)) return false;
  pack_by_dim(dim_, keys_by_dim_);
  for (int part = 0; part < parts_; ++part) {
    for (std::int64_t row = 0; row < padded(count); row += kDepth) {
      (void)amx::pack(split_.of[part] + row * dim_, dim_, dim_, keys_.of[part] + row * dim_);
    }
  }
  return true;
}

bool AmxGradients::set_rows(const float* queries, const float* grad_outputs, std::int64_t rows) {
  rows_ = rows;
  if (!split_rows(queries, rows, sizes_.dim, dim_, queries_) ||
      !split_rows(grad_outputs, rows, sizes_.value_dim, value_dim_, grad_outputs_)) {
    return false;
  }
  const std::int64_t stride = stride_of(sizes_.rows);
  for (int part = 0; part < parts_; ++part) {
    amx::transpose(queries_.of[part], padded(rows), dim_, queries_by_dim_.of[part], stride);
    amx::transpose(grad_outputs_.of[part], padded(rows), value_dim_, grad_outputs_by_dim_.of[part],
                   stride);
  }
  return true;
}

void AmxGradients::multiply_operands(Columns columns, float factor, const Matrices& results) const {
  const auto multiply = [&](const amx::Parts& rows, const amx::Parts& by_dim, std::int64_t dim,
                            float* product) {
    const amx::Shape shape{.rows = padded(rows_),
                           .columns = padded(columns.count),
                           .depth = dim,
                           .left_stride = dim,
                           .depth_stride = 1,
                           .column_stride = dim / kDepth,
                           .result_stride = results.stride};
    amx::multiply(shape, rows, from(by_dim, columns.begin * dim), false, product);
  };
  multiply(queries_, keys_by_dim_, dim_, results.weights);
  for (std::int64_t row = 0; row < rows_; ++row) {
    amx::scale(results.weights + row * results.stride, padded(columns.count), factor);
  }
  if (results.grads != nullptr) {
    multiply(grad_outputs_, values_by_dim_, value_dim_, results.grads);
  }
}

// Splits a matrix of the tile, with zeros behind its rows and columns.
bool AmxGradients::split_matrix(float* matrix, std::int64_t stride, std::int64_t columns) {
  const std::int64_t to_stride = stride_of(sizes_.columns);
  for (std::int64_t row = 0; row < rows_; ++row) {
    float* const entries = matrix + row * stride;
    std::fill(entries + columns, entries + padded(columns), 0.0F);
    if (!amx::split(entries, padded(columns), from(split_, row * to_stride)) &&
        !lost_entries_are_negligible(entries, columns)) {
      return false;
    }
  }
  for (std::int64_t row = rows_; row < padded(rows_); ++row) {
    clear(from(split_, row * to_stride), padded(columns));
  }
  return true;
}

// Packs the split matrix as the right side of a product.
void AmxGradients::pack_matrix(std::int64_t count) {
  const std::int64_t stride = stride_of(sizes_.columns);
  for (int part = 0; part < parts_; ++part) {
    for (std::int64_t row = 0; row < padded(rows_); row += kDepth) {
      (void)amx::pack(split_.of[part] + row * stride, stride, count,
                      packed_.of[part] + row * count);
    }
  }
}

// sums [dim, columns] += rows_by_dim [dim, rows] · the packed matrix.
void AmxGradients::add_product(std::int64_t dim, const amx::Parts& rows_by_dim, Columns columns,
                               float* sums) {
  const std::int64_t count = padded(columns.count);
  const std::int64_t stride = stride_of(sizes_.columns);
  const amx::Shape shape{.rows = dim,
                         .columns = count,
                         .depth = padded(rows_),
                         .left_stride = stride_of(sizes_.rows),
                         .depth_stride = count / kColumns,
                         .column_stride = 1,
                         .result_stride = stride};
  if (parts_ < 3) {
    amx::multiply(shape, rows_by_dim, packed_, true, sums + columns.begin);
    return;
  }
  // Summing a whole sequence into one register would round too often for float32.
  amx::multiply(shape, rows_by_dim, packed_, false, product_);
  for (std::int64_t d = 0; d < dim; ++d) {
    amx::add_to(sums + d * stride + columns.begin, product_ + d * stride, count);
  }
}

bool AmxGradients::multiply_gradients(Columns columns, const Matrices& matrices,
                                      const Wanted& wanted) {
  const std::int64_t count = padded(columns.count);
  // Both matrices are split before anything is added, the weights even where dV is not wanted: the
  // bits of dQ must not depend on that.
  if (!split_matrix(matrices.weights, matrices.stride, columns.count)) return false;
  if (wanted.value) pack_matrix(count);
  if ((wanted.query || wanted.key) &&
      !split_matrix(matrices.grads, matrices.stride, columns.count)) {
    return false;
  }
  if (wanted.value) add_product(value_dim_, grad_outputs_by_dim_, columns, grad_values_);
  if (wanted.query) {
    const amx::Shape shape{.rows = padded(rows_),
                           .columns = dim_,
                           .depth = count,
                           .left_stride = stride_of(sizes_.columns),
                           .depth_stride = dim_ / kColumns,
                           .column_stride = 1,
                           .result_stride = dim_};
    amx::multiply(shape, split_, from(keys_, columns.begin * dim_), false, grad_queries_);
  }
  if (wanted.key) {
    pack_matrix(count);
    add_product(dim_, queries_by_dim_, columns, grad_keys_);
  }
  return true;
}

void AmxGradients::add_sums(std::int64_t count, float* grad_keys, float* grad_values) const {
  const std::int64_t stride = stride_of(sizes_.columns);
  const auto add = [&](const float* sums, std::int64_t dim, float* to) {
    for (std::int64_t j = 0; j < count; ++j) {
      for (std::int64_t d = 0; d < dim; ++d) to[j * dim + d] += sums[d * stride + j];
    }
  };
  add(grad_keys_, sizes_.dim, grad_keys);
  add(grad_values_, sizes_.value_dim, grad_values);
}

}  // namespace annulus
