#include "native/sgemm_product.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <cblas.h>

#include <annulus/core/convert.hpp>

#include "native/all_finite.hpp"

namespace annulus {
namespace {

// Rows of logits are longer than a tile, so that they do not all map to the same cache set.
constexpr std::int64_t kLogitStride = kTileColumns + kRowAlignment;

blasint blas(std::int64_t size) {
  return static_cast<blasint>(size);
}

class SgemmProduct final : public TileProduct {
 public:
  SgemmProduct(const TileProductSizes& sizes, MemoryPool& memory) : sizes_(sizes) {
    const std::array counts{sizes.rows * sizes.dim, sizes.rows * kLogitStride,
                            sizes.rows * sizes.value_dim, sizes.columns * sizes.dim,
                            sizes.columns * sizes.value_dim};
    const std::array parts{&queries_, &logits_, &accumulator_, &key_workspace_, &value_workspace_};
    std::int64_t total = 0;
    for (const std::int64_t count : counts) total += round_up_to_row_alignment(count);
    workspace_ =
        memory.allocate(static_cast<std::size_t>(total) * sizeof(float), "the workspace of native");
    auto* next = static_cast<float*>(workspace_.data());
    for (std::size_t i = 0; i < std::size(counts); ++i) {
      *parts[i] = next;
      next += round_up_to_row_alignment(counts[i]);
    }
  }

  [[nodiscard]] MatrixPath path() const override { return MatrixPath::sgemm; }
  [[nodiscard]] std::int64_t strip_rows(bool hidden) const override {
    constexpr std::int64_t kShort = 64;
    return hidden ? kShort : sizes_.rows;
  }
  [[nodiscard]] float factor() const override { return 1.0F; }

  void start(std::int64_t rows) override {
    std::fill_n(accumulator_, rows * sizes_.value_dim, 0.0F);
  }

  void set_query(std::int64_t index, const void* query) override {
    float* const row = queries_ + index * sizes_.dim;
    to_float32(query, sizes_.dtype, row, sizes_.dim);
    if (sizes_.scale == 0) std::for_each_n(row, sizes_.dim, [](float& entry) { entry *= 0; });
  }

  void load_keys(const TensorRows& keys) override {
    columns_ = keys.count;
    keys_ = load(keys, key_workspace_);
  }

  void load_values(const TensorRows& values, bool hidden) override {
    values_ = load(values, value_workspace_);
    poisoned_.clear();
    if (hidden) leave_out_poison();
  }

  void multiply_keys(Strip strip) override {
    strip_ = strip;
    // BLAS reads no matrix that it is to multiply by 0, but 0 · NaN is NaN.
    const float scale = sizes_.scale == 0 ? 1.0F : static_cast<float>(sizes_.scale);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, blas(strip.rows()), blas(strip.columns),
                blas(sizes_.dim), scale, queries_ + strip.begin * sizes_.dim, blas(sizes_.dim),
                keys_.data + strip.first_column * keys_.stride, blas(keys_.stride), 0.0F, logits_,
                blas(kLogitStride));
  }

  [[nodiscard]] float* logits(std::int64_t row) override {
    return logits_ + (row - strip_.begin) * kLogitStride;
  }
  [[nodiscard]] WeightRow weights(std::int64_t row) override { return {.floats = logits(row)}; }
  [[nodiscard]] float weight(std::int64_t row, std::int64_t column) const override {
    return logits_[(row - strip_.begin) * kLogitStride + column - strip_.first_column];
  }

  void multiply_values(Strip strip) override {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, blas(strip.rows()),
                blas(sizes_.value_dim), blas(strip.columns), 1.0F, logits_, blas(kLogitStride),
                values_.data + strip.first_column * values_.stride, blas(values_.stride), 1.0F,
                accumulator(strip.begin), blas(sizes_.value_dim));
  }

  [[nodiscard]] bool leaves_out(float value) const override { return !std::isfinite(value); }

  [[nodiscard]] float* accumulator(std::int64_t index) override {
    return accumulator_ + index * sizes_.value_dim;
  }

 private:
  /// Row-major.
  struct Operand {
    const float* data = nullptr;
    std::int64_t stride = 0;
  };

  // The rows in place if OpenBLAS can read them there, else converted into `workspace`.
  static Operand load(const TensorRows& rows, float* workspace) {
    const ConstTensorView& tensor = *rows.tensor;
    const std::int64_t dim = tensor.size(3);
    const std::int64_t stride = tensor.stride(1);
    const bool usable = stride >= dim && stride <= std::numeric_limits<blasint>::max();
    if (tensor.dtype() == DType::float32 && usable) {
      return {static_cast<const float*>(rows.row(0)), stride};
    }
    if (stride == dim) {
      to_float32(rows.row(0), tensor.dtype(), workspace, rows.count * dim);
    } else {
      for (std::int64_t i = 0; i < rows.count; ++i) {
        to_float32(rows.row(i), tensor.dtype(), workspace + i * dim, dim);
      }
    }
    return {workspace, dim};
  }

  void leave_out_poison() {
    const std::int64_t dim = sizes_.value_dim;
    if (values_.stride == dim && all_finite(values_.data, columns_ * dim)) return;
    for (std::int64_t c = 0; c < columns_; ++c) {
      if (!all_finite(values_.data + c * values_.stride, dim)) poisoned_.push_back(c);
    }
    if (poisoned_.empty()) return;
    if (values_.data != value_workspace_) {
      for (std::int64_t c = 0; c < columns_; ++c) {
        std::copy_n(values_.data + c * values_.stride, dim, value_workspace_ + c * dim);
      }
    }
    for (const std::int64_t c : poisoned_) {
      for (float* v = value_workspace_ + c * dim; v != value_workspace_ + (c + 1) * dim; ++v) {
        if (!std::isfinite(*v)) *v = 0.0F;
      }
    }
    values_ = {value_workspace_, dim};
  }

  const TileProductSizes sizes_;
  Buffer workspace_;
  float* queries_ = nullptr;          // [rows, D]
  float* logits_ = nullptr;           // [rows, kLogitStride]
  float* accumulator_ = nullptr;      // [rows, Dv]
  float* key_workspace_ = nullptr;    // [columns, D], for keys that cannot be read in place
  float* value_workspace_ = nullptr;  // [columns, Dv], likewise
  Operand keys_;
  Operand values_;
  std::int64_t columns_ = 0;
  Strip strip_;  // of `logits_`
};

}  // namespace

std::unique_ptr<TileProduct> make_sgemm_product(const TileProductSizes& sizes, MemoryPool& memory) {
  return std::make_unique<SgemmProduct>(sizes, memory);
}

}  // namespace annulus
