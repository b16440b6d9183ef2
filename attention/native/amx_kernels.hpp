#pragma once

#include <cstdint>

/// What needs the tile registers of a CPU (Intel's Advanced Matrix Extensions). Everything but
/// available() may be called only where that is true. A matrix in bfloat16 is an array of its bits.
namespace annulus::amx {

/// A tile register holds 16 rows of 64 bytes: 16 × 32 values in bfloat16, or 16 × 16 in float32.
inline constexpr std::int64_t kRows = 16;
inline constexpr std::int64_t kColumns = 16;
inline constexpr std::int64_t kDepth = 32;
/// The right side of a product, kDepth × kColumns, as the registers want it: row p holds, for each
/// column, its values 2p and 2p + 1.
inline constexpr std::int64_t kPackedTile = kDepth * kColumns;

/// Whether the CPU has them, and Linux lets this process use them. Asks it once.
[[nodiscard]] bool available();

/// Packs the transpose of `rows` [16, depth] into depth / kDepth tiles. `depth` is a multiple of
/// kDepth.
void pack_transposed(const std::uint16_t* rows, std::int64_t stride, std::int64_t depth,
                     std::uint16_t* tiles);

/// Packs `rows` [kDepth, columns] into columns / kColumns tiles; `columns` is a multiple of
/// kDepth. Returns whether all of them are finite.
[[nodiscard]] bool pack(const std::uint16_t* rows, std::int64_t stride, std::int64_t columns,
                        std::uint16_t* tiles);

/// Splits values in float16 exactly into sums of two in bfloat16; the low one of an infinity or a
/// NaN is 0. Returns whether all of them are finite.
[[nodiscard]] bool split_float16(const std::uint16_t* values, std::int64_t count,
                                 std::uint16_t* high, std::uint16_t* low);

/// A product A · B of `depth`; A is row-major, tile (k, n) of B lies at
/// right + (k · depth_stride + n · column_stride) · kPackedTile.
struct Factors {
  const std::uint16_t* left = nullptr;
  const std::uint16_t* right = nullptr;
};
struct Shape {
  std::int64_t rows = 0;     ///< a multiple of kRows
  std::int64_t columns = 0;  ///< a multiple of 2 kColumns
  std::int64_t depth = 0;    ///< a multiple of kDepth
  std::int64_t left_stride = 0;
  std::int64_t depth_stride = 0;
  std::int64_t column_stride = 0;
  std::int64_t result_stride = 0;
};
/// result = Σ of `count` products, or result += that.
void multiply(const Shape& shape, const Factors* factors, int count, bool add, float* result);

}  // namespace annulus::amx
