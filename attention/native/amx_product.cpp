#include "native/amx_product.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include <annulus/core/convert.hpp>
#include <annulus/core/division.hpp>

#include "native/amx_kernels.hpp"
#include "native/amx_parts.hpp"

namespace annulus {
namespace {

using amx::clear;
using amx::from;
using amx::kColumns;
using amx::kDepth;
using amx::kRows;
using Bits = std::uint16_t;

// Four registers of sums: 2 · 16 rows.
constexpr std::int64_t kStripRows = 2 * kRows;
// Longer than a tile, so that rows do not all map to the same cache set.
constexpr std::int64_t kStride = kTileColumns + kRowAlignment;

bool finite(Bits bfloat16) {
  constexpr Bits kExponent = 0x7f80;
  return (bfloat16 & kExponent) != kExponent;
}

class AmxProduct final : public TileProduct {
 public:
  AmxProduct(const TileProductSizes& sizes, MemoryPool& memory)
      : sizes_(sizes),
        parts_(amx::parts_of(sizes.dtype)),
        dim_(round_up(sizes.dim, kDepth)),
        value_dim_(round_up(sizes.value_dim, kDepth)),
        scale_(static_cast<float>(sizes.scale)),
        query_rows_(static_cast<std::size_t>(sizes.rows)) {
    const std::int64_t rows = sizes.rows + kStripRows;  // a strip reads and writes whole registers
    const std::int64_t columns = round_up(sizes.columns, kDepth);
    workspace_ = amx::allocate(memory, parts_,
                               {{&queries_, rows * dim_},
                                {&keys_, columns * dim_},
                                {&values_, columns * value_dim_},
                                {&weights_, kStripRows * kStride},
                                {&staged_, kDepth * std::max(dim_, value_dim_)}},
                               {{&logits_, kStripRows * kStride},
                                {&accumulator_, rows * value_dim_},
                                {&product_, kStripRows * value_dim_}});
  }

  [[nodiscard]] MatrixPath path() const override { return MatrixPath::amx; }
  [[nodiscard]] std::int64_t strip_rows(bool /*hidden*/) const override { return kStripRows; }
  // set_query() applies the sign of the scale to the queries, or the scale itself if it is 0.
  [[nodiscard]] float factor() const override { return scale_ == 0 ? 1.0F : std::abs(scale_); }

  void start(std::int64_t rows) override {
    unsplit_queries_.clear();
    std::fill_n(accumulator_, (rows + kStripRows) * value_dim_, 0.0F);
    clear(from(queries_, rows * dim_), kStripRows * dim_);
  }

  void set_query(std::int64_t index, const void* query) override {
    query_rows_[static_cast<std::size_t>(index)] = query;
    const amx::Parts to = from(queries_, index * dim_);
    if (!stage(query, sizes_.dim, dim_, to)) unsplit_queries_.push_back(index);
    if (scale_ > 0) return;
    const auto scaled = [this](Bits bfloat16) {
      constexpr Bits kSign = 0x8000;
      constexpr Bits kInfinity = 0x7f80;
      constexpr Bits kNan = 0x7fc0;
      if (scale_ < 0) return static_cast<Bits>(bfloat16 ^ kSign);
      return (bfloat16 & kInfinity) == kInfinity ? kNan : Bits{0};
    };
    for (int part = 0; part < parts_; ++part) {
      std::transform(to.of[part], to.of[part] + dim_, to.of[part], scaled);
    }
  }

  void load_keys(const TensorRows& keys) override {
    key_rows_ = keys;
    unsplit_keys_.clear();
    for (std::int64_t begin = 0; begin < keys.count; begin += kDepth) {
      std::int64_t stride = dim_;
      const amx::Parts rows = rows_of(keys, begin, sizes_.dim, dim_, stride, unsplit_keys_);
      for (int part = 0; part < parts_; ++part) {
        for (std::int64_t row = 0; row < kDepth; row += kColumns) {
          amx::pack_transposed(rows.of[part] + row * stride, stride, dim_,
                               keys_.of[part] + (begin + row) * dim_);
        }
      }
    }
  }

  void load_values(const TensorRows& values, bool /*hidden*/) override {
    poisoned_.clear();
    for (std::int64_t begin = 0; begin < values.count; begin += kDepth) {
      std::int64_t stride = value_dim_;
      const amx::Parts rows =
          rows_of(values, begin, sizes_.value_dim, value_dim_, stride, poisoned_);
      const amx::Parts to = from(values_, begin * value_dim_);
      bool all_finite = true;
      for (int part = 0; part < parts_; ++part) {
        all_finite = amx::pack(rows.of[part], stride, value_dim_, to.of[part]) && all_finite;
      }
      if (all_finite) continue;
      // Only values in bfloat16 can still be non-finite here: the others were split.
      stage_finite(values, begin);
      (void)amx::pack(staged_.of[0], value_dim_, value_dim_, to.of[0]);
    }
  }

  void multiply_keys(Strip strip) override {
    strip_ = strip;
    const amx::Shape shape{.rows = round_up(strip.rows(), kRows),
                           .columns = round_up(strip.columns, 2 * kColumns),
                           .depth = dim_,
                           .left_stride = dim_,
                           .depth_stride = 1,
                           .column_stride = dim_ / kDepth,
                           .result_stride = kStride};
    amx::multiply(shape, from(queries_, strip.begin * dim_), from(keys_, strip.first_column * dim_),
                  false, logits_);
    if (!unsplit_keys_.empty() || !unsplit_queries_.empty()) repair_logits();
  }

  [[nodiscard]] float* logits(std::int64_t row) override {
    return logits_ + (row - strip_.begin) * kStride;
  }
  [[nodiscard]] WeightRow weights(std::int64_t row) override {
    const amx::Parts to = from(weights_, (row - strip_.begin) * kStride);
    return {.parts = {to.of[0], to.of[1], to.of[2]}};
  }
  [[nodiscard]] float weight(std::int64_t row, std::int64_t column) const override {
    float sum = 0;
    for (int part = parts_ - 1; part >= 0; --part) {
      BFloat16 value;
      value.bits = weights_.of[part][(row - strip_.begin) * kStride + column - strip_.first_column];
      sum += static_cast<float>(value);
    }
    return sum;
  }

  void multiply_values(Strip strip) override {
    const std::int64_t depth = round_up(strip.columns, kDepth);
    const std::int64_t rows = round_up(strip.rows(), kRows);
    // Rows past the end may belong to another strip: nothing may be added to them.
    for (std::int64_t r = strip.rows(); r < rows; ++r) clear(from(weights_, r * kStride), depth);
    const amx::Shape shape{.rows = rows,
                           .columns = value_dim_,
                           .depth = depth,
                           .left_stride = kStride,
                           .depth_stride = value_dim_ / kColumns,
                           .column_stride = 1,
                           .result_stride = value_dim_};
    const amx::Parts values = from(values_, strip.first_column * value_dim_);
    float* const sums = accumulator(strip.begin);
    if (parts_ < 3) {
      amx::multiply(shape, weights_, values, true, sums);
    } else {
      // Summing a whole sequence into one register would round too often for float32.
      amx::multiply(shape, weights_, values, false, product_);
      amx::add_to(sums, product_, strip.rows() * value_dim_);
    }
  }

  [[nodiscard]] float* accumulator(std::int64_t index) override {
    return accumulator_ + index * value_dim_;
  }

  [[nodiscard]] bool leaves_out(float value) const override {
    if (parts_ < 3) return !std::isfinite(value);
    std::array<Bits, 3> parts{};
    return !amx::split(&value, 1, {{&parts[0], &parts[1], &parts[2]}});
  }

 private:
  // Stages one row, padded with zeros. Returns false if some of its values could not be split.
  bool stage(const void* row, std::int64_t count, std::int64_t padded, const amx::Parts& to) const {
    clear(from(to, count), padded - count);
    switch (parts_) {
      case 1:
        std::memcpy(to.of[0], row, static_cast<std::size_t>(count) * sizeof(Bits));
        return true;
      case 2:
        return amx::split_float16(static_cast<const Bits*>(row), count, to);
      default:
        return amx::split(static_cast<const float*>(row), count, to);
    }
  }

  // Rows are often too far apart for the hardware prefetcher.
  static constexpr std::int64_t kAhead = 8;
  void prefetch(const void* row, std::int64_t count) const {
    constexpr std::int64_t kLine = 64;
    const auto bytes = count * static_cast<std::int64_t>(size_of(sizes_.dtype));
    for (std::int64_t byte = 0; byte < bytes; byte += kLine) {
      __builtin_prefetch(static_cast<const std::byte*>(row) + byte);
    }
  }

  // kDepth rows from `begin` on: in place, or staged and padded with zeros. Adds rows that could
  // not be split to `unsplit`.
  amx::Parts rows_of(const TensorRows& rows, std::int64_t begin, std::int64_t count,
                     std::int64_t padded, std::int64_t& stride,
                     std::vector<std::int64_t>& unsplit) const {
    const std::int64_t present = std::min(kDepth, rows.count - begin);
    if (parts_ == 1 && present == kDepth && count == padded) {
      stride = rows.tensor->stride(1);
      return {{static_cast<Bits*>(const_cast<void*>(rows.row(begin)))}};  // only read
    }
    for (std::int64_t i = 0; i < present; ++i) {
      prefetch(rows.row(std::min(begin + i + kAhead, rows.count - 1)), count);
      if (!stage(rows.row(begin + i), count, padded, from(staged_, i * padded))) {
        unsplit.push_back(begin + i);
      }
    }
    clear(from(staged_, present * padded), (kDepth - present) * padded);
    return staged_;
  }

  // Stages values in bfloat16, with 0 where they are not finite, and lists their rows.
  void stage_finite(const TensorRows& values, std::int64_t begin) {
    const std::int64_t present = std::min(kDepth, values.count - begin);
    clear(staged_, kDepth * value_dim_);
    for (std::int64_t i = 0; i < present; ++i) {
      Bits* const row = staged_.of[0] + i * value_dim_;
      std::memcpy(row, values.row(begin + i),
                  static_cast<std::size_t>(sizes_.value_dim) * sizeof(Bits));
      if (std::all_of(row, row + value_dim_, finite)) continue;
      poisoned_.push_back(begin + i);
      std::replace_if(
          row, row + value_dim_, [](Bits bits) { return !finite(bits); }, Bits{0});
    }
  }

  // Computes the logits of rows and columns that could not be split, one by one.
  void repair_logits() {
    const auto dims = static_cast<std::size_t>(sizes_.dim);
    const auto among = [](const std::vector<std::int64_t>& sorted, std::int64_t index) {
      return std::binary_search(sorted.begin(), sorted.end(), index);
    };
    std::vector<float> query(dims);
    std::vector<float> key(dims);
    for (std::int64_t row = strip_.begin; row < strip_.end; ++row) {
      const bool whole_row = among(unsplit_queries_, row);
      to_float32(query_rows_[static_cast<std::size_t>(row)], sizes_.dtype, query.data(),
                 sizes_.dim);
      for (std::int64_t i = 0; i < strip_.columns; ++i) {
        const std::int64_t column = strip_.first_column + i;
        if (!whole_row && !among(unsplit_keys_, column)) continue;
        to_float32(key_rows_.row(column), sizes_.dtype, key.data(), sizes_.dim);
        float sum = 0;
        for (std::size_t d = 0; d < dims; ++d) sum += query[d] * key[d];
        logits(row)[i] = scale_ == 0 ? sum * 0.0F : std::copysign(1.0F, scale_) * sum;
      }
    }
  }

  const TileProductSizes sizes_;
  const int parts_;               // per operand and weight
  const std::int64_t dim_;        // padded
  const std::int64_t value_dim_;  // likewise
  const float scale_;
  Buffer workspace_;
  amx::Parts queries_;            // [rows, dim]
  amx::Parts keys_;               // packed, [columns / 16, dim / 32] tiles
  amx::Parts values_;             // packed, [columns / 32, value_dim / 16] tiles
  amx::Parts weights_;            // [kStripRows, kStride]
  amx::Parts staged_;             // [kDepth, dim]
  float* logits_ = nullptr;       // [kStripRows, kStride]
  float* accumulator_ = nullptr;  // [rows, value_dim]
  float* product_ = nullptr;      // [kStripRows, value_dim]
  std::vector<const void*> query_rows_;
  TensorRows key_rows_;
  std::vector<std::int64_t> unsplit_queries_;  // queries that could not be split
  std::vector<std::int64_t> unsplit_keys_;     // likewise
  Strip strip_;
};

}  // namespace

std::unique_ptr<TileProduct> make_amx_product(const TileProductSizes& sizes, MemoryPool& memory) {
  return std::make_unique<AmxProduct>(sizes, memory);
}

}  // namespace annulus
