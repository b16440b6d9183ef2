#pragma once

#include <cstdint>

#include <annulus/core/dtype.hpp>
#include <annulus/core/memory.hpp>

#include "native/amx_kernels.hpp"

namespace annulus {

/// The five products of a tile of the backward pass by AMX, for one thread. Operands, weights and
/// gradients of logits are sums of bfloat16 parts, as in an AmxProduct: one part for bfloat16, two
/// for float16, three for float32.
class AmxGradients {
 public:
  struct Sizes {
    DType dtype = DType::float32;
    std::int64_t rows = 0;     ///< of a tile, at most
    std::int64_t columns = 0;  ///< likewise
    std::int64_t dim = 0;
    std::int64_t value_dim = 0;
  };
  /// Columns of a tile to compute with; `begin` is a multiple of amx::kDepth.
  struct Columns {
    std::int64_t begin = 0;
    std::int64_t count = 0;
  };
  /// Row-major [rows, stride]: weights P, and the gradients of q·k. Rows have room for whole
  /// multiples of amx::kDepth columns, and there is room for whole multiples of amx::kDepth rows.
  struct Matrices {
    float* weights = nullptr;
    float* grads = nullptr;  ///< null: neither dQ nor dK is wanted
    std::int64_t stride = 0;
  };

  AmxGradients(const Sizes& sizes, MemoryPool& memory);

  /// Takes keys [count, D] and values [count, Dv], and begins sums of their gradients. Returns
  /// false if an entry is no sum of such parts; the columns then must not be multiplied.
  [[nodiscard]] bool set_columns(const float* keys, const float* values, std::int64_t count);
  /// The same for queries [rows, D] and dO [rows, Dv].
  [[nodiscard]] bool set_rows(const float* queries, const float* grad_outputs, std::int64_t rows);

  /// weights = factor · Q Kᵀ, and grads = dO Vᵀ.
  void multiply_operands(Columns columns, float factor, const Matrices& results) const;

  struct Wanted {
    bool query = false;
    bool key = false;
    bool value = false;
  };
  /// Sets dQ = dS K, and adds dSᵀ Q and Pᵀ dO to the sums. Overwrites the padding of the matrices.
  /// Returns false, and adds nothing, if the parts would lose an entry that counts.
  [[nodiscard]] bool multiply_gradients(Columns columns, const Matrices& matrices,
                                        const Wanted& wanted);
  /// dQ of a row, D values.
  [[nodiscard]] const float* grad_query(std::int64_t row) const {
    return grad_queries_ + row * dim_;
  }
  /// Adds the sums to gradients of keys [count, D] and values [count, Dv].
  void add_sums(std::int64_t count, float* grad_keys, float* grad_values) const;

 private:
  [[nodiscard]] bool split_rows(const float* rows, std::int64_t count, std::int64_t dim,
                                std::int64_t padded, const amx::Parts& to) const;
  [[nodiscard]] bool split_matrix(float* matrix, std::int64_t stride, std::int64_t columns);
  void pack_matrix(std::int64_t count);
  void add_product(std::int64_t dim, const amx::Parts& rows_by_dim, Columns columns, float* sums);

  const Sizes sizes_;
  const int parts_;
  const std::int64_t dim_;        // padded, as all sizes below
  const std::int64_t value_dim_;  // likewise
  Buffer workspace_;
  std::int64_t rows_ = 0;           // of the tile at hand
  amx::Parts queries_;              // [rows, D]
  amx::Parts grad_outputs_;         // [rows, Dv]
  amx::Parts queries_by_dim_;       // [D, rows]
  amx::Parts grad_outputs_by_dim_;  // [Dv, rows]
  amx::Parts keys_by_dim_;          // packed for Q Kᵀ: [columns / 16, D / 32] tiles
  amx::Parts values_by_dim_;        // likewise
  amx::Parts keys_;                 // packed for dS K: [columns / 32, D / 16] tiles
  amx::Parts split_;                // weights or gradients [rows, columns], and columns of operands
  amx::Parts packed_;               // [rows / 32, columns / 16] tiles of them
  float* grad_queries_ = nullptr;   // [rows, D]
  float* grad_keys_ = nullptr;      // [D, columns]
  float* grad_values_ = nullptr;    // [Dv, columns]
  float* product_ = nullptr;        // [max(D, Dv), columns]
};

}  // namespace annulus
