#include "native/amx_product.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include <annulus/core/dtype.hpp>

#include "native/amx_kernels.hpp"

namespace annulus {
namespace {

using amx::kColumns;
using amx::kDepth;
using amx::kPackedTile;
using amx::kRows;
using Bits = std::uint16_t;

// Four registers of sums: 2 · 16 rows.
constexpr std::int64_t kStripRows = 2 * kRows;
// Longer than a tile, so that rows do not all fall into one set of the cache.
constexpr std::int64_t kStride = kTileColumns + kRowAlignment;

constexpr std::int64_t round_up(std::int64_t count, std::int64_t unit) {
  return (count + unit - 1) / unit * unit;
}

float widened(Bits bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
}

// The values of an operand, or their high and low parts.
struct Planes {
  Bits* high = nullptr;
  Bits* low = nullptr;
  [[nodiscard]] Planes from(std::int64_t index) const {
    return {high + index, low == nullptr ? nullptr : low + index};
  }
  [[nodiscard]] float value(std::int64_t index) const {
    return widened(high[index]) + (low == nullptr ? 0.0F : widened(low[index]));
  }
};

class AmxProduct final : public TileProduct {
 public:
  AmxProduct(const TileProductSizes& sizes, MemoryPool& memory)
      : sizes_(sizes),
        split_(sizes.dtype == DType::float16),
        dim_(round_up(sizes.dim, kDepth)),
        value_dim_(round_up(sizes.value_dim, kDepth)),
        scale_(static_cast<float>(sizes.scale)) {
    const std::int64_t rows = sizes.rows + kStripRows;  // a strip reads and writes whole registers
    const std::int64_t columns = round_up(sizes.columns, kDepth);
    const std::array halves{rows * dim_, columns * dim_, columns * value_dim_, kStripRows * kStride,
                            kDepth * std::max(dim_, value_dim_)};
    const std::array half_parts{&queries_, &keys_, &values_, &weights_, &staged_};
    const std::array floats{kStripRows * kStride, rows * value_dim_};
    const std::array float_parts{&logits_, &accumulator_};
    std::int64_t bytes = 0;
    for (const std::int64_t count : halves) bytes += (split_ ? 4 : 2) * count;
    for (const std::int64_t count : floats) bytes += 4 * count;
    workspace_ = memory.allocate(static_cast<std::size_t>(bytes));
    auto* next = static_cast<std::byte*>(workspace_.data());
    const auto take = [&next](auto*& part, std::int64_t count) {
      part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(next);
      next += count * static_cast<std::int64_t>(sizeof(*part));
    };
    for (std::size_t i = 0; i < std::size(halves); ++i) {
      take(half_parts[i]->high, halves[i]);
      if (split_) take(half_parts[i]->low, halves[i]);
    }
    for (std::size_t i = 0; i < std::size(floats); ++i) take(*float_parts[i], floats[i]);
  }

  [[nodiscard]] MatrixPath path() const override { return MatrixPath::amx; }
  [[nodiscard]] std::int64_t strip_rows() const override { return kStripRows; }
  // The queries have its sign, or are 0 if it is.
  [[nodiscard]] float factor() const override { return scale_ == 0 ? 1.0F : std::abs(scale_); }

  void start(std::int64_t rows) override {
    poisoned_queries_.clear();
    std::fill_n(accumulator_, (rows + kStripRows) * value_dim_, 0.0F);
    clear(queries_.from(rows * dim_), kStripRows * dim_);
  }

  void set_query(std::int64_t index, const void* query) override {
    const Planes to = queries_.from(index * dim_);
    if (!stage(query, sizes_.dim, dim_, to) && split_) poisoned_queries_.push_back(index);
    if (scale_ > 0) return;
    const auto sign = static_cast<Bits>(scale_ < 0 ? 0x8000 : 0);
    const auto kept = static_cast<Bits>(scale_ < 0 ? 0xffff : 0);
    for (std::int64_t d = 0; d < dim_; ++d) {
      to.high[d] = static_cast<Bits>((to.high[d] ^ sign) & kept);
      if (split_) to.low[d] = static_cast<Bits>((to.low[d] ^ sign) & kept);
    }
  }

  void load_keys(const TensorRows& keys) override {
    columns_ = keys.count;
    poisoned_keys_.clear();
    for (std::int64_t begin = 0; begin < columns_; begin += kDepth) {
      std::int64_t stride = dim_;
      const Planes rows = rows_of(keys, begin, sizes_.dim, dim_, stride, poisoned_keys_);
      for (std::int64_t half = 0; half < kDepth; half += kColumns) {
        const Planes to = keys_.from((begin + half) * dim_);
        amx::pack_transposed(rows.high + half * stride, stride, dim_, to.high);
        if (split_) amx::pack_transposed(rows.low + half * stride, stride, dim_, to.low);
      }
    }
  }

  void load_values(const TensorRows& values, bool /*hidden*/) override {
    poisoned_.clear();
    for (std::int64_t begin = 0; begin < columns_; begin += kDepth) {
      std::int64_t stride = value_dim_;
      const std::size_t known = poisoned_.size();
      const Planes rows = rows_of(values, begin, sizes_.value_dim, value_dim_, stride, poisoned_);
      const Planes to = values_.from(begin * value_dim_);
      bool finite = poisoned_.size() == known;
      if (finite) finite = amx::pack(rows.high, stride, value_dim_, to.high);
      if (!finite) {
        leave_out_poison(values, begin);
        (void)amx::pack(staged_.high, value_dim_, value_dim_, to.high);
      }
      if (split_) (void)amx::pack(rows.low, stride, value_dim_, to.low);
    }
  }

  void multiply_keys(Strip strip) override {
    strip_ = strip;
    const amx::Shape shape{.rows = round_up(strip.rows(), kRows),
                           .columns = round_up(columns_, 2 * kColumns),
                           .depth = dim_,
                           .left_stride = dim_,
                           .depth_stride = 1,
                           .column_stride = dim_ / kDepth,
                           .result_stride = kStride};
    multiply(shape, queries_.from(strip.begin * dim_), keys_, false, logits_);
    if (!poisoned_keys_.empty() || !poisoned_queries_.empty()) repair_logits();
  }

  [[nodiscard]] float* logits(std::int64_t row) override {
    return logits_ + (row - strip_.begin) * kStride;
  }
  [[nodiscard]] WeightRow weights(std::int64_t row) override {
    const Planes to = weights_.from((row - strip_.begin) * kStride);
    return {.high = to.high, .low = to.low};
  }
  [[nodiscard]] float weight(std::int64_t row, std::int64_t column) const override {
    return weights_.value((row - strip_.begin) * kStride + column);
  }

  void multiply_values(Strip strip) override {
    const std::int64_t depth = round_up(columns_, kDepth);
    const std::int64_t rows = round_up(strip.rows(), kRows);
    // Rows past the strip may belong to another one: nothing may be added to them.
    for (std::int64_t r = strip.rows(); r < rows; ++r) clear(weights_.from(r * kStride), depth);
    const amx::Shape shape{.rows = rows,
                           .columns = value_dim_,
                           .depth = depth,
                           .left_stride = kStride,
                           .depth_stride = value_dim_ / kColumns,
                           .column_stride = 1,
                           .result_stride = value_dim_};
    multiply(shape, weights_, values_, true, accumulator(strip.begin));
  }

  [[nodiscard]] float* accumulator(std::int64_t index) override {
    return accumulator_ + index * value_dim_;
  }

 private:
  void clear(const Planes& planes, std::int64_t count) const {
    std::fill_n(planes.high, count, Bits{0});
    if (split_) std::fill_n(planes.low, count, Bits{0});
  }

  // One row, padded with zeros. Returns false if it was split and is not finite.
  bool stage(const void* row, std::int64_t count, std::int64_t padded, const Planes& to) const {
    clear(to.from(count), padded - count);
    const auto* bits = static_cast<const Bits*>(row);
    if (split_) return amx::split_float16(bits, count, to.high, to.low);
    std::memcpy(to.high, bits, static_cast<std::size_t>(count) * sizeof(Bits));
    return true;
  }

  // kDepth rows from `begin` on: in place, or staged and padded with zeros. Rows that were split
  // and are not finite are added to `poisoned`.
  Planes rows_of(const TensorRows& rows, std::int64_t begin, std::int64_t count,
                 std::int64_t padded, std::int64_t& stride,
                 std::vector<std::int64_t>& poisoned) const {
    const std::int64_t whole = std::min(kDepth, rows.count - begin);
    if (!split_ && whole == kDepth && count == padded) {
      stride = rows.tensor.stride(1);
      // Read only.
      return {static_cast<Bits*>(const_cast<void*>(rows.row(begin)))};
    }
    for (std::int64_t i = 0; i < whole; ++i) {
      if (!stage(rows.row(begin + i), count, padded, staged_.from(i * padded))) {
        poisoned.push_back(begin + i);
      }
    }
    clear(staged_.from(whole * padded), (kDepth - whole) * padded);
    return staged_;
  }

  // Stages the high parts of values, with 0 for those that are not finite, and lists their rows.
  void leave_out_poison(const TensorRows& values, std::int64_t begin) {
    const std::int64_t whole = std::min(kDepth, columns_ - begin);
    std::erase_if(poisoned_, [begin](std::int64_t column) { return column >= begin; });
    clear(staged_, kDepth * value_dim_);
    for (std::int64_t i = 0; i < whole; ++i) {
      Bits* const row = staged_.high + i * value_dim_;
      (void)stage(values.row(begin + i), sizes_.value_dim, value_dim_,
                  staged_.from(i * value_dim_));
      constexpr Bits kExponent = 0x7f80;
      const auto finite = [](Bits bits) { return (bits & kExponent) != kExponent; };
      if (std::all_of(row, row + value_dim_, finite)) continue;
      poisoned_.push_back(begin + i);
      for (std::int64_t d = 0; d < value_dim_; ++d) row[d] = finite(row[d]) ? row[d] : Bits{0};
    }
  }

  void multiply(const amx::Shape& shape, const Planes& left, const Planes& right, bool add,
                float* result) const {
    const std::array<amx::Factors, 3> factors{
        {{left.high, right.high}, {left.low, right.high}, {left.high, right.low}}};
    amx::multiply(shape, factors.data(), split_ ? 3 : 1, add, result);
  }

  [[nodiscard]] float key(std::int64_t column, std::int64_t d) const {
    const std::int64_t tile = column / kColumns * (dim_ / kDepth) + d / kDepth;
    return keys_.value(tile * kPackedTile + d % kDepth / 2 * kDepth + column % kColumns * 2 +
                       d % 2);
  }

  // The parts of a number that is not finite may multiply to NaN where the number itself would not:
  // such logits are computed one by one.
  void repair_logits() {
    const auto among = [](const std::vector<std::int64_t>& sorted, std::int64_t index) {
      return std::binary_search(sorted.begin(), sorted.end(), index);
    };
    for (std::int64_t row = strip_.begin; row < strip_.end; ++row) {
      const bool whole_row = among(poisoned_queries_, row);
      for (std::int64_t column = 0; column < columns_; ++column) {
        if (!whole_row && !among(poisoned_keys_, column)) continue;
        float sum = 0;
        for (std::int64_t d = 0; d < sizes_.dim; ++d) {
          sum += queries_.value(row * dim_ + d) * key(column, d);
        }
        logits(row)[column] = sum;
      }
    }
  }

  const TileProductSizes sizes_;
  const bool split_;
  const std::int64_t dim_;        // padded
  const std::int64_t value_dim_;  // likewise
  const float scale_;
  Buffer workspace_;
  Planes queries_;                              // [rows, dim]
  Planes keys_;                                 // packed, [columns / 16, dim / 32] tiles
  Planes values_;                               // packed, [columns / 32, value_dim / 16] tiles
  Planes weights_;                              // [kStripRows, kStride]
  Planes staged_;                               // [kDepth, dim]
  float* logits_ = nullptr;                     // [kStripRows, kStride]
  float* accumulator_ = nullptr;                // [rows, value_dim]
  std::vector<std::int64_t> poisoned_keys_;     // float16 only
  std::vector<std::int64_t> poisoned_queries_;  // float16 only
  std::int64_t columns_ = 0;
  Strip strip_;
};

}  // namespace

std::unique_ptr<TileProduct> make_amx_product(const TileProductSizes& sizes, MemoryPool& memory) {
  return std::make_unique<AmxProduct>(sizes, memory);
}

}  // namespace annulus
