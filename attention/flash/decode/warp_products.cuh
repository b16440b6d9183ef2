#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

// Matrix products of one warp, 16×8×16 (PTX, "mma.m16n8k16"). With row = lane / 4 and column = 2 ·
// (lane % 4), a lane has of a 16×16 left operand the elements (row, column), (row + 8, column),
// (row, column + 8) and (row + 8, column + 8), each with its right neighbour; of a 16×8 sum the
// elements at (row, column) and (row + 8, column), likewise.
namespace annulus::flash::decode {

/// Loads four 8×8 matrices, whose rows are 16 bytes each. Lane 8i + j says where row j of matrix i
/// lies. Of each, a lane gets the elements (lane / 4, 2 · (lane % 4)) and its right neighbour, of
/// the transposed matrix if kTransposed.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], const void* row) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }
}

/// sum += left · right.
template <class Element>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const std::uint32_t (&left)[4],
                                             std::uint32_t right_low, std::uint32_t right_high) {
  if constexpr (std::is_same_v<Element, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
  }
}

}  // namespace annulus::flash::decode
