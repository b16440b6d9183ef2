#pragma once

#include <cstdint>

/// Kernels on the tile registers of a CPU (Intel's Advanced Matrix Extensions). Everything but
/// available() may be called only if available() is true. bfloat16 values are passed as their bits.
namespace annulus::amx {

/// A tile register holds 16 rows of 64 bytes: 16 × 32 values in bfloat16, or 16 × 16 in float32.
inline constexpr std::int64_t kRows = 16;
inline constexpr std::int64_t kColumns = 16;
inline constexpr std::int64_t kDepth = 32;
/// The right operand of a product, kDepth × kColumns, in the layout of the registers: row p holds,
/// for each column, its values 2p and 2p + 1.
inline constexpr std::int64_t kPackedTile = kDepth * kColumns;

/// True if the CPU has tile registers and Linux lets this process use them. The first call asks for
/// permission.
[[nodiscard]] bool available();

/// Packs the transpose of `rows` [16, depth] into depth / kDepth tiles. `depth` is a multiple of
/// kDepth.
void pack_transposed(const std::uint16_t* rows, std::int64_t stride, std::int64_t depth,
                     std::uint16_t* tiles);

/// Packs `rows` [kDepth, columns] into columns / kColumns tiles; `columns` is a multiple of
/// kDepth. Returns whether all of them are finite.
[[nodiscard]] bool pack(const std::uint16_t* rows, std::int64_t stride, std::int64_t columns,
                        std::uint16_t* tiles);

/// A matrix as a sum of one to three matrices in bfloat16; unused parts are null.
struct Parts {
  std::uint16_t* of[3] = {};  // NOLINT(modernize-avoid-c-arrays): see amx_kernels.cpp
};

/// Splits float32 values into as many parts as there are, exactly into three; each part is the
/// rounded remainder of the parts before it. Values that cannot be split become 0: infinities,
/// NaNs, values that round to infinity, and values other than 0 below 2⁻¹⁰⁰, whose parts the
/// registers would flush to 0 as denormals. Returns whether all values were split.
[[nodiscard]] bool split(const float* values, std::int64_t count, const Parts& parts);
/// The same for values in float16, exactly into two parts.
[[nodiscard]] bool split_float16(const std::uint16_t* values, std::int64_t count,
                                 const Parts& parts);

/// A product A · B. A is row-major; tile (k, n) of B begins at right + (k · depth_stride + n ·
/// column_stride) · kPackedTile.
struct Shape {
  std::int64_t rows = 0;     ///< a multiple of kRows
  std::int64_t columns = 0;  ///< a multiple of 2 kColumns
  std::int64_t depth = 0;    ///< a multiple of kDepth
  std::int64_t left_stride = 0;
  std::int64_t depth_stride = 0;
  std::int64_t column_stride = 0;
  std::int64_t result_stride = 0;
};
/// result = A · B, or result += A · B if `add`. Of three parts, the products that are too small to
/// affect the rounded result are left out.
void multiply(const Shape& shape, const Parts& left, const Parts& right, bool add, float* result);

/// to [columns, to_stride] = the transpose of `rows` [count, columns]; both counts are multiples of
/// kDepth.
void transpose(const std::uint16_t* rows, std::int64_t count, std::int64_t columns,
               std::uint16_t* to, std::int64_t to_stride);

/// values *= factor, `count` of them, a multiple of kColumns.
void scale(float* values, std::int64_t count, float factor);
/// sums += values, `count` of them, a multiple of kColumns.
void add_to(float* sums, const float* values, std::int64_t count);

}  // namespace annulus::amx
