#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::vanilla {

/// A matrix, row-major.
template <class Real>
struct Matrix {
  Matrix(std::int64_t row_count, std::int64_t column_count)
      : rows(row_count),
        columns(column_count),
        entries(static_cast<std::size_t>(row_count * column_count)) {}
  [[nodiscard]] std::span<Real> row(std::int64_t i) {
    return {entries.data() + i * columns, static_cast<std::size_t>(columns)};
  }
  [[nodiscard]] std::span<const Real> row(std::int64_t i) const {
    return {entries.data() + i * columns, static_cast<std::size_t>(columns)};
  }
  std::int64_t rows;
  std::int64_t columns;
  std::vector<Real> entries;
};

/// tensor[batch, :, head, :].
template <class Real>
Matrix<Real> matrix_of(const ConstTensorView& tensor, std::int64_t batch, std::int64_t head) {
  Matrix<Real> matrix(tensor.size(1), tensor.size(3));
  std::vector<float> row(static_cast<std::size_t>(matrix.columns));
  for (std::int64_t i = 0; i < matrix.rows; ++i) {
    const void* address = tensor.address({batch, i, head});
    if (tensor.dtype() == DType::float64) {
      const auto* values = static_cast<const double*>(address);
      std::copy_n(values, matrix.columns, matrix.row(i).begin());
    } else {
      to_float32(address, tensor.dtype(), row.data(), matrix.columns);
      std::copy(row.begin(), row.end(), matrix.row(i).begin());
    }
  }
  return matrix;
}

/// The most bytes that a DenseHead of this dtype holds in any step: the logits, a byte each for
/// whether they are visible, and the matrices of queries, keys, values and outputs.
inline double bytes_of_head(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t dim,
                            std::int64_t value_dim) {
  const auto real = static_cast<double>(size_of(dtype));
  const auto t = static_cast<double>(rows);
  const auto s = static_cast<double>(columns);
  return t * s * (real + 1) + (t + s) * static_cast<double>(dim + value_dim) * real;
}

/// Computes attention for one batch and one query head of a block, step by step (docs/semantics.md
/// §1): logits, softmax, dropout, product with the values. `Real` is the softmax dtype.
template <class Real>
class DenseHead {
 public:
  /// `batch` and `head` are indices within the block, which must outlive the object.
  DenseHead(const AttentionProblem& problem, const AttentionBlock& block, std::int64_t batch,
            std::int64_t head)
      : problem_(problem),
        block_(block),
        batch_(batch),
        head_(head),
        weights_(block.rows.size(), block.columns.size()),
        visible_(block.rows.size(), block.columns.size()),
        lse_(static_cast<std::size_t>(block.rows.size())),
        maximum_(lse_.size()) {}

  /// Sets the weights of visible pairs to their logits: scale · q·k, capped, plus the bias. Sets
  /// `slopes`, if given, to the derivatives of the soft cap.
  void make_logits(Matrix<Real>* slopes = nullptr) {
    const auto query = matrix_of<Real>(block_.query, batch_, head_);
    const auto key = matrix_of<Real>(block_.key, batch_, kv_head());
    const Real scale = static_cast<Real>(problem_.logit_scale());
    for (std::int64_t i = 0; i < weights_.rows; ++i) {
      for (std::int64_t j = 0; j < weights_.columns; ++j) {
        if (!is_visible(i, j)) continue;
        visible_.row(i)[j] = 1;
        Real logit = 0;
        for (std::int64_t d = 0; d < query.columns; ++d) logit += query.row(i)[d] * key.row(j)[d];
        logit *= scale;
        if (problem_.soft_cap) {
          const Real cap = static_cast<Real>(*problem_.soft_cap);
          if (slopes != nullptr) slopes->row(i)[j] = square(1 / std::cosh(logit / cap));
          logit = cap * std::tanh(logit / cap);
        }
        if (const auto& bias = block_.scores.bias) {
          logit += bias->template at<float>({batch_, head_, i, block_.scores.key_of(j, column(j))});
        }
        weights_.row(i)[j] = logit;
      }
    }
  }

  /// Turns logits into weights exp(logit − LSE); hidden pairs keep 0. The LSE includes the `sinks`.
  /// If the visible logits of a row are all −∞ and there are no sinks, their weights are 0/0 = NaN.
  void apply_softmax(std::span<const float> sinks = {}) {
    constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
    for (std::int64_t i = 0; i < weights_.rows; ++i) {
      Real max = kMinusInfinity;
      const auto raise = [&max](Real logit) {
        if (logit > max || std::isnan(logit)) max = logit;  // NaN stays
      };
      for (const float sink : sinks) raise(sink);
      for_visible(i, raise);
      Real sum = 0;
      if (max != kMinusInfinity) {
        for (const float sink : sinks) sum += std::exp(static_cast<Real>(sink) - max);
        for_visible(i, [&](Real& logit) {
          logit = std::exp(logit - max);
          sum += logit;
        });
      } else {
        for_visible(i, [](Real& logit) { logit = 0; });
      }
      for_visible(i, [&](Real& weight) { weight /= sum; });
      lse_[static_cast<std::size_t>(i)] = sum == 0 ? kMinusInfinity : max + std::log(sum);
      maximum_[static_cast<std::size_t>(i)] = std::isnan(sum) ? sum : max;
    }
  }

  /// Drops weights and rescales the others.
  void apply_dropout() {
    if (!problem_.dropout) return;
    for (std::int64_t i = 0; i < weights_.rows; ++i) {
      for (std::int64_t j = 0; j < weights_.columns; ++j) weights_.row(i)[j] *= keep(i, j);
    }
  }

  /// The factor that dropout gives a weight.
  [[nodiscard]] Real keep(std::int64_t i, std::int64_t j) const {
    if (!problem_.dropout) return 1;
    const bool drops = problem_.dropout->drops(global_batch(), global_head(), row(i), column(j));
    return drops ? 0 : static_cast<Real>(problem_.dropout->keep_scale());
  }

  /// The weights times the values, [t,Dv]. Hidden values are skipped: they may be NaN.
  [[nodiscard]] Matrix<Real> output() const {
    const auto value = matrix_of<Real>(block_.value, batch_, kv_head());
    Matrix<Real> output(weights_.rows, value.columns);
    for (std::int64_t i = 0; i < weights_.rows; ++i) {
      for (std::int64_t j = 0; j < weights_.columns; ++j) {
        if (!visible_.row(i)[j]) continue;
        const Real weight = weights_.row(i)[j];
        for (std::int64_t d = 0; d < value.columns; ++d) {
          output.row(i)[d] += weight * value.row(j)[d];
        }
      }
    }
    return output;
  }

  [[nodiscard]] const Matrix<Real>& weights() const { return weights_; }
  [[nodiscard]] bool sees(std::int64_t i, std::int64_t j) const { return visible_.row(i)[j] != 0; }
  [[nodiscard]] Real lse(std::int64_t row) const { return lse_[static_cast<std::size_t>(row)]; }
  /// The largest logit of a row; NaN if its LSE is NaN.
  [[nodiscard]] Real maximum(std::int64_t row) const {
    return maximum_[static_cast<std::size_t>(row)];
  }

 private:
  static Real square(Real x) { return x * x; }
  [[nodiscard]] std::int64_t kv_head() const {
    return head_ / (block_.query.size(2) / block_.key.size(2));
  }
  [[nodiscard]] std::int64_t global_batch() const { return block_.first_batch + batch_; }
  [[nodiscard]] std::int64_t global_head() const { return block_.first_head + head_; }
  [[nodiscard]] bool is_visible(std::int64_t i, std::int64_t j) const {
    return problem_.mask.visible(global_batch(), global_head(), row(i), column(j)) &&
           block_.scores.shows(batch_, head_, i, block_.scores.key_of(j, column(j)));
  }
  [[nodiscard]] GlobalPosition row(std::int64_t i) const {
    return block_.rows.global(LocalPosition(i));
  }
  [[nodiscard]] GlobalPosition column(std::int64_t j) const {
    return block_.columns.global(LocalPosition(j));
  }
  template <class Change>
  void for_visible(std::int64_t i, const Change& change) {
    for (std::int64_t j = 0; j < weights_.columns; ++j) {
      if (visible_.row(i)[j]) change(weights_.row(i)[j]);
    }
  }

  const AttentionProblem& problem_;
  const AttentionBlock& block_;
  std::int64_t batch_;
  std::int64_t head_;
  Matrix<Real> weights_;
  Matrix<std::uint8_t> visible_;
  std::vector<Real> lse_;
  std::vector<Real> maximum_;
};

}  // namespace annulus::vanilla
