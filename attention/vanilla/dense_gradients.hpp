#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include <annulus/attention/implementation.hpp>

#include "vanilla/dense_head.hpp"

namespace annulus::vanilla {

/// tensor[…] as Real, of a tensor in float32 or float64.
template <class Real>
Real entry_of(const ConstTensorView& tensor, std::int64_t batch, std::int64_t head,
              std::int64_t row) {
  return tensor.dtype() == DType::float64 ? static_cast<Real>(tensor.at<double>({batch, head, row}))
                                          : static_cast<Real>(tensor.at<float>({batch, head, row}));
}

/// target += term, in float32 or float64.
template <class Real>
void add_to(void* target, DType dtype, std::int64_t index, Real term) {
  if (dtype == DType::float64) {
    static_cast<double*>(target)[index] += static_cast<double>(term);
  } else {
    static_cast<float*>(target)[index] += static_cast<float>(term);
  }
}

/// tensor[batch, :, head, :] += matrix; nothing if the tensor is not wanted.
template <class Real>
void add_to(const TensorView& tensor, std::int64_t batch, std::int64_t head,
            const Matrix<Real>& matrix) {
  if (tensor.shape().rank() == 0) return;
  for (std::int64_t i = 0; i < matrix.rows; ++i) {
    void* const row = tensor.address({batch, i, head});
    for (std::int64_t d = 0; d < matrix.columns; ++d) {
      add_to(row, tensor.dtype(), d, matrix.row(i)[d]);
    }
  }
}

template <class Real>
void add_scaled(std::span<Real> to, Real factor, std::span<const Real> row) {
  for (std::size_t d = 0; d < row.size(); ++d) to[d] += factor * row[d];
}

/// Adds the gradients of one batch and one key/value head of a block, with the query heads that
/// read it (docs/semantics.md §1, "Backward"). Beside a DenseHead it holds the derivatives of a
/// soft cap, and gradients of the size of its operands.
template <class Real>
void add_gradients(const AttentionProblem& problem, const BackwardBlock& block,
                   const Gradients& gradients, std::int64_t batch, std::int64_t kv_head) {
  const AttentionBlock forward = forward_of(block);
  const auto key = matrix_of<Real>(block.key, batch, kv_head);
  const auto value = matrix_of<Real>(block.value, batch, kv_head);
  Matrix<Real> grad_key(key.rows, key.columns);
  Matrix<Real> grad_value(value.rows, value.columns);
  const Real scale = static_cast<Real>(problem.logit_scale());
  const std::int64_t group = block.query.size(2) / block.key.size(2);
  for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const auto query = matrix_of<Real>(block.query, batch, head);
    const auto grad_output = matrix_of<Real>(block.grad_output, batch, head);
    Matrix<Real> grad_query(query.rows, query.columns);
    Matrix<Real> slopes(problem.soft_cap ? query.rows : 0, key.rows);
    DenseHead<Real> dense(problem, forward, batch, head);
    dense.make_logits(problem.soft_cap ? &slopes : nullptr);
    for (std::int64_t i = 0; i < query.rows; ++i) {
      const Real lse = entry_of<Real>(block.lse, batch, head, i);
      if (lse == -std::numeric_limits<Real>::infinity()) continue;
      const Real delta = entry_of<Real>(block.delta, batch, head, i);
      const auto grad = grad_output.row(i);
      for (std::int64_t j = 0; j < key.rows; ++j) {
        if (!dense.sees(i, j)) continue;
        const Real probability = std::exp(dense.weights().row(i)[j] - lse);
        const Real keep = dense.keep(i, j);
        Real grad_probability = 0;
        for (std::int64_t d = 0; d < value.columns; ++d) {
          grad_probability += grad[d] * value.row(j)[d];
        }
        const Real grad_logit = probability * (keep * grad_probability - delta);
        const Real slope = problem.soft_cap ? slopes.row(i)[j] : 1;
        const Real grad_product = scale * slope * grad_logit;
        add_scaled(grad_query.row(i), grad_product, key.row(j));
        add_scaled(grad_key.row(j), grad_product, query.row(i));
        add_scaled(grad_value.row(j), probability * keep, grad);
        if (gradients.bias.shape().rank() > 0) {
          const GlobalPosition column = block.columns.global(LocalPosition(j));
          void* const entry =
              gradients.bias.address({batch, head, i, block.scores.key_of(j, column)});
          add_to(entry, gradients.bias.dtype(), 0, grad_logit);
        }
      }
    }
    add_to(gradients.query, batch, head, grad_query);
  }
  add_to(gradients.key, batch, kv_head, grad_key);
  add_to(gradients.value, batch, kv_head, grad_value);
}

}  // namespace annulus::vanilla
