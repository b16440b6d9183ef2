#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"
#include "flash/backward/scores.cuh"
#include "flash/backward/walk.cuh"
#include "flash/backward/warp_scores.cuh"

// Bits of a warp's pairs. A thread that examined just its own pairs would go through 16 or 32 rows
// one after another. So each lane examines all 16 keys of some rows, and each thread then reads the
// bits of its scores from shared memory.
namespace annulus::flash::backward {

/// Byte offsets of the bits of a consumer warp's pairs in its shared memory: dropout, the dense
/// mask, and the bits that the warp finds by itself. Tiles of 128 queries have no dense mask, whose
/// place their dropout takes too.
inline constexpr int kDropped = 0, kMasked = 128, kFound = 256;

/// Bit i: the bit of the thread's score i, of 32. `of_rows`: 16 bits for each of 64 queries, one
/// for each of the warp's keys.
[[nodiscard]] __device__ __forceinline__ std::uint32_t gather_bits(const unsigned char* of_rows,
                                                                   int lane) {
  std::uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t two_rows =
        *reinterpret_cast<const std::uint32_t*>(of_rows + 2 * (8 * i + 2 * (lane % 4)));
    // In bits 0, 8, 16 and 24: scores 4i, 4i + 2, 4i + 1 and 4i + 3.
    const std::uint32_t four = two_rows >> lane / 4 & 0x01010101U;
    bits |= ((four | four >> 6U | four >> 15U | four >> 21U) & 15U) << (4 * i);
  }
  return bits;
}

/// The 16 columns of a warp, for masked tiles.
class ListedColumns {
 public:
  __device__ __forceinline__ ListedColumns(const Arguments& arguments, const WarpScores& scores,
                                           std::int32_t tile_columns)
      : a(arguments),
        of(scores),
        mine_(listed_column(a, of.batch, tile_columns, of.column + of.lane % 16)) {
    first_ = of_lane(0);
    bool alike = mine_.position == first_.position + of.lane % 16 && mine_.id == first_.id;
    if (a.mask.row_blocks != nullptr) {
      alike = alike && mine_.position / a.mask.key_block == first_.position / a.mask.key_block;
    }
    alike_ = __all_sync(0xffffffff, alike) != 0;
  }

  /// Bit k: this thread's row sees column k. Called by all threads of the warp.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t seen_by(const ListedRow& row) const {
    if (alike_) return row.sees_16(a, of.batch, of.head, first_);
    std::uint32_t seen = 0;
#pragma unroll 1
    for (int k = 0; k < 16; ++k) {
      if (row.sees(a, of.batch, of.head, of_lane(k))) seen |= std::uint32_t{1} << k;
    }
    return seen;
  }

 private:
  [[nodiscard]] __device__ __forceinline__ ListedColumn of_lane(int lane) const {
    return {__shfl_sync(0xffffffff, mine_.position, lane), __shfl_sync(0xffffffff, mine_.id, lane)};
  }

  const Arguments& a;
  const WarpScores& of;
  ListedColumn mine_, first_;
  bool alike_;
};

/// Bit i: byte i is not 0.
[[nodiscard]] __device__ __forceinline__ std::uint32_t set_bytes(std::uint32_t word) {
  const std::uint32_t set = (((word & 0x7f7f7f7fU) + 0x7f7f7f7fU) | word) >> 7U & 0x01010101U;
  return set * 0x01020408U >> 24U & 15U;
}

/// The same for 16 bytes.
[[nodiscard]] __device__ __forceinline__ std::uint32_t set_of_16(const uint4& bytes) {
  return set_bytes(bytes.x) | set_bytes(bytes.y) << 4U | set_bytes(bytes.z) << 8U |
         set_bytes(bytes.w) << 12U;
}

/// Bit k: the dense mask hides column `column` + k of a row, of 16. `neighbours`: the columns are
/// neighbours in position.
[[nodiscard]] __device__ __forceinline__ std::uint32_t hidden_by_mask(
    const Arguments& a, std::int32_t batch, std::int32_t head, std::int32_t row,
    std::int32_t column, bool neighbours) {
  // Rows past the end read the bias of the last row, which may be any number at a hidden pair.
  if (row >= a.rows) return 0xffff;
  const cuda::ScoreArgument<std::uint8_t>& mask = a.scores.mask;
  const std::uint8_t* const keys = mask.row(batch, head, row);
  const std::uint8_t* const first = keys + key_at(a, column) * mask.strides[3];
  std::uint32_t shown = 0;
  if ((neighbours || a.scores.by_column) && mask.strides[3] == 1 && column + 16 <= a.columns &&
      reinterpret_cast<std::uintptr_t>(first) % 16 == 0) {
    shown = set_of_16(__ldg(reinterpret_cast<const uint4*>(first)));
  } else {
#pragma unroll 4
    for (int k = 0; k < 16; ++k) {
      if (__ldg(keys + key_at(a, column + k) * mask.strides[3]) != 0) shown |= 1U << k;
    }
  }
  return ~shown;
}

}  // namespace annulus::flash::backward
