#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "flash/hopper/barrier.cuh"

// Products of a warpgroup (wgmma): 64 rows of A times N columns of B, 16 deep, added to float32
// accumulators in the registers of its 128 threads.
//
// Thread t of the warpgroup holds, for every 8 columns n of the result, elements 4n to 4n+3: rows
// 16·(t/32) + (t%32)/4 and that + 8, two columns each from 8n + 2·(t%4) on. A in registers is laid
// out likewise, packed in pairs: 16 of its columns are 4 registers.

namespace annulus::hopper {

/// A distance from 64 columns to the next 64, as operand_descriptor() takes it, in a descriptor.
__device__ __forceinline__ constexpr std::uint64_t wide_step_in_descriptor(std::uint32_t bytes) {
  return static_cast<std::uint64_t>(bytes >> 4) << 16;
}

/// Where an operand lies in shared memory, in the layout that a TMA box of 64 half-precision
/// columns with 128-byte swizzle leaves: rows of 128 bytes, in groups of 8. Operands begin at
/// multiples of 1024 bytes.
///
/// For an operand whose 16 summed-over elements are neighbours in memory (Q, K), `wide_step` is not
/// used; for one whose rows are summed over (V), it is the distance from 64 columns to the next 64.
__device__ __forceinline__ std::uint64_t operand_descriptor(const void* operand,
                                                            std::uint32_t wide_step = 16) {
  constexpr std::uint64_t kSwizzle128 = 1ULL << 62;
  constexpr std::uint64_t kGroupStep = 1024 >> 4;  // from 8 rows to the next 8
  return kSwizzle128 | kGroupStep << 32 | wide_step_in_descriptor(wide_step) |
         (shared_address(operand) & 0x3FFFF) >> 4;
}
/// The same operand, `bytes` further on.
__device__ __forceinline__ std::uint64_t advance(std::uint64_t descriptor, std::uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

/// The same value, but the compiler knows that the whole warp shares it, and keeps operands made
/// from it in uniform registers. Large kernels otherwise move four values there before each
/// product, which takes longer than the product.
__device__ __forceinline__ std::uint32_t uniform(std::uint32_t value) {
  std::uint32_t lane = 0;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  // Adding the lane keeps the compiler from dropping the shuffle.
  return __shfl_sync(0xffffffff, value + lane, 0);
}
__device__ __forceinline__ std::uint64_t uniform(std::uint64_t descriptor) {
  constexpr std::uint64_t kUpper = 0xFFFFFFFF00000000;  // a constant in all descriptors
  return (descriptor & kUpper) | uniform(static_cast<std::uint32_t>(descriptor));
}

/// To be called before the first product that uses registers written by other instructions.
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Ends a group of products.
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending of the latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving uses of operands in registers across this point: to be called for
/// all of them after a wait, and before products_begin() for those written by other instructions.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(std::uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

/// Leaves registers undefined, at no cost, for operands that are only written.
template <int kCount>
__device__ __forceinline__ void leave_undefined(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(registers[i]));
}

template <class Element, int kColumns>
struct Product;

// clang-format off
#define ANNULUS_TEN(tens) \
  "%" #tens "0,%" #tens "1,%" #tens "2,%" #tens "3,%" #tens "4," \
  "%" #tens "5,%" #tens "6,%" #tens "7,%" #tens "8,%" #tens "9"
#define ANNULUS_LIST_32 ANNULUS_TEN() "," ANNULUS_TEN(1) "," ANNULUS_TEN(2) ",%30,%31"
#define ANNULUS_LIST_40 ANNULUS_TEN() "," ANNULUS_TEN(1) "," ANNULUS_TEN(2) "," ANNULUS_TEN(3)
#define ANNULUS_LIST_64 ANNULUS_LIST_40 "," ANNULUS_TEN(4) "," ANNULUS_TEN(5) ",%60,%61,%62,%63"
#define ANNULUS_LIST_88 ANNULUS_LIST_40 "," ANNULUS_TEN(4) "," ANNULUS_TEN(5) "," \
  ANNULUS_TEN(6) "," ANNULUS_TEN(7) ",%80,%81,%82,%83,%84,%85,%86,%87"
#define ANNULUS_LIST_128 ANNULUS_LIST_40 "," ANNULUS_TEN(4) "," ANNULUS_TEN(5) "," \
  ANNULUS_TEN(6) "," ANNULUS_TEN(7) "," ANNULUS_TEN(8) "," ANNULUS_TEN(9) "," ANNULUS_TEN(10) "," \
  ANNULUS_TEN(11) ",%120,%121,%122,%123,%124,%125,%126,%127"

#define ANNULUS_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define ANNULUS_OPERANDS_32(d, i) ANNULUS_8(d, i), ANNULUS_8(d, i + 8), ANNULUS_8(d, i + 16), \
  ANNULUS_8(d, i + 24)
#define ANNULUS_OPERANDS_40(d, i) ANNULUS_OPERANDS_32(d, i), ANNULUS_8(d, i + 32)
#define ANNULUS_OPERANDS_64(d, i) ANNULUS_OPERANDS_32(d, i), ANNULUS_OPERANDS_32(d, i + 32)
#define ANNULUS_OPERANDS_88(d, i) ANNULUS_OPERANDS_64(d, i), ANNULUS_8(d, i + 64), \
  ANNULUS_8(d, i + 72), ANNULUS_8(d, i + 80)
#define ANNULUS_OPERANDS_128(d, i) ANNULUS_OPERANDS_64(d, i), ANNULUS_OPERANDS_64(d, i + 64)

// `o0` to `o5` number the operands behind the accumulators, of which there are `half`.
#define ANNULUS_PRODUCT(element, type, columns, half, o0, o1, o2, o3, o4, o5)                      \
  template <>                                                                                      \
  struct Product<element, columns> {                                                               \
    /* d = A·Bᵀ, or added to d; A and B in shared memory, the depth innermost. */                  \
    template <bool kAdd>                                                                           \
    __device__ __forceinline__ static void shared_times_shared(float (&d)[half], std::uint64_t a,  \
                                                               std::uint64_t b) {                  \
      asm volatile(                                                                                \
          "{\n.reg .pred add;\nsetp.ne.b32 add, %" #o2 ", 0;\n"                                    \
          "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                    \
          " {" ANNULUS_LIST_##half "}, %" #o0 ", %" #o1 ", add, 1, 1, 0, 0;\n}\n"                  \
          : ANNULUS_OPERANDS_##half(d, 0)                                                          \
          : "l"(a), "l"(b), "n"(kAdd ? 1 : 0));                                                    \
    }                                                                                              \
    /* d = Aᵀ·B, or added to d; A and B in shared memory, their rows summed over. */                \
    template <bool kAdd>                                                                           \
    __device__ __forceinline__ static void transposed_times_shared(                                \
        float (&d)[half], std::uint64_t a, std::uint64_t b) {                                      \
      asm volatile(                                                                                \
          "{\n.reg .pred add;\nsetp.ne.b32 add, %" #o2 ", 0;\n"                                    \
          "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                    \
          " {" ANNULUS_LIST_##half "}, %" #o0 ", %" #o1 ", add, 1, 1, 1, 1;\n}\n"                  \
          : ANNULUS_OPERANDS_##half(d, 0)                                                          \
          : "l"(a), "l"(b), "n"(kAdd ? 1 : 0));                                                    \
    }                                                                                              \
    /* d = A·B, or added to d if `add` is not 0; A in registers, B in shared memory, its columns   \
       innermost. */                                                                               \
    __device__ __forceinline__ static void registers_times_shared(                                 \
        float (&d)[half], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,  \
        std::uint64_t b, int add) {                                                                \
      asm volatile(                                                                                \
          "{\n.reg .pred add;\nsetp.ne.b32 add, %" #o5 ", 0;\n"                                    \
          "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                    \
          " {" ANNULUS_LIST_##half "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4            \
          ", add, 1, 1, 1;\n}\n"                                                                   \
          : ANNULUS_OPERANDS_##half(d, 0)                                                          \
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));                                 \
    }                                                                                              \
  };
#define ANNULUS_PRODUCTS(element, type)                             \
  ANNULUS_PRODUCT(element, type, 64, 32, 32, 33, 34, 35, 36, 37)    \
  ANNULUS_PRODUCT(element, type, 80, 40, 40, 41, 42, 43, 44, 45)    \
  ANNULUS_PRODUCT(element, type, 128, 64, 64, 65, 66, 67, 68, 69)   \
  ANNULUS_PRODUCT(element, type, 176, 88, 88, 89, 90, 91, 92, 93)   \
  ANNULUS_PRODUCT(element, type, 256, 128, 128, 129, 130, 131, 132, 133)

ANNULUS_PRODUCTS(__nv_bfloat16, "bf16")
ANNULUS_PRODUCTS(__half, "f16")

#undef ANNULUS_PRODUCTS
#undef ANNULUS_PRODUCT
#undef ANNULUS_OPERANDS_128
#undef ANNULUS_OPERANDS_88
#undef ANNULUS_OPERANDS_64
#undef ANNULUS_OPERANDS_40
#undef ANNULUS_OPERANDS_32
#undef ANNULUS_8
#undef ANNULUS_LIST_128
#undef ANNULUS_LIST_88
#undef ANNULUS_LIST_64
#undef ANNULUS_LIST_40
#undef ANNULUS_LIST_32
#undef ANNULUS_TEN
// clang-format on

}  // namespace annulus::hopper
