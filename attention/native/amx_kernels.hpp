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

/// A matrix as a sum of up to three in bfloat16; the others are null.
struct Parts {
  std::uint16_t* of[3] = {};  // NOLINT(modernize-avoid-c-arrays): see amx_kernels.cpp
};

/// Splits float32 exactly into three parts, each of which is what the ones before it lost, rounded.
/// 0 takes the place of values that have no such parts: infinities, NaNs, those that a part rounds
/// to infinity, and those so small (below 2⁻¹⁰⁰, but for 0) that the registers would lose parts of
/// them as denormal. Returns whether there are none.
[[nodiscard]] bool split_float32(const float* values, std::int64_t count, const Parts& parts);
/// The same for float16, in two parts.
[[nodiscard]] bool split_float16(const std::uint16_t* values, std::int64_t count,
                                 const Parts& parts);

/// A product A · B of `depth`; A is row-major, tile (k, n) of B lies at
/// right + (k · depth_stride + n · column_stride) · kPackedTile.
struct Shape {
  std::int64_t rows = 0;     ///< a multiple of kRows
  std::int64_t columns = 0;  ///< a multiple of 2 kColumns
  std::int64_t depth = 0;    ///< a multiple of kDepth
  std::int64_t left_stride = 0;
  std::int64_t depth_stride = 0;
  std::int64_t column_stride = 0;
  std::int64_t result_stride = 0;
};
/// result = A · B, or result += A · B. Of matrices in several parts, products of parts that cannot
/// matter beside the rounding of the others are left out.
void multiply(const Shape& shape, const Parts& left, const Parts& right, bool add, float* result);

/// sums += values, `count` of them.
void add_to(float* sums, const float* values, std::int64_t count);

}  // namespace annulus::amx
