#pragma once

#include <cstdint>
#include <type_traits>

#include "flash/backward/arguments.hpp"
#include "flash/backward/gradient.cuh"
#include "flash/backward/kernels.hpp"
#include "flash/backward/soft_cap.cuh"
#include "flash/backward/special.cuh"
#include "flash/backward/tiles.cuh"
#include "flash/backward/walk.cuh"
#include "flash/hopper/tma.cuh"
#include "flash/hopper/wgmma.cuh"
#include "flash/softmax.cuh"

// Wide heads have two kernels. The one for dK and dV leaves dS in global memory, and the one for dQ
// multiplies it by the keys. Each pair thus costs 2 bytes written and 2 bytes read. A single kernel
// takes longer: every 64 or 128 keys, it would add 4 bytes for each row and dim in global memory.
// With two kernels, dQ, dK and dV are also summed in a fixed order.
namespace annulus::flash::backward {

/// Tiles have 64 rows and 64 columns. kGeneral: for problems with bias, dense mask or dropout.
template <class Element_, int kDim_, int kValueDim_, bool kGeneral_>
struct WideTiles : Tiles<Element_, kDim_> {
  static constexpr int kValueDim = kValueDim_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kDrops = kGeneral;
  static constexpr int kKeys = kWideTileKeys;
  static constexpr int kOutputElements = kKeys * kValueDim;
  /// Key tiles of a block of the kernel for dK and dV.
  static constexpr int kKeyTiles = kDim_ == 256 || kGeneral ? 1 : 2;
  struct KeyBlock {
    static constexpr int kKeys = kKeyTiles * kWideTileKeys;
    static constexpr int kQueries = WideTiles::kKeys;
  };
  /// Registers of a thread of that kernel that loads, and of one that computes.
  static constexpr int kFewRegisters = kKeyTiles == 1 ? 40 : 24;
  static constexpr int kManyRegisters = kKeyTiles == 1 ? 232 : 240;
  static_assert(Tiles<Element_, kDim_>::kQueries == kKeys);
};

/// Two values −0.
inline constexpr std::uint32_t kNegativeZeros = 0x80008000;

/// Warps of the loading warpgroup that look for special values in masked tiles.
inline constexpr int kWatchers = 3;

/// The watchers' verdict on a slot of the ring.
struct Verdict {
  hopper::Barrier known;
  std::int32_t special[kWatchers];  ///< what each has found, a bit for each tile

  [[nodiscard]] __device__ __forceinline__ std::int32_t wait(std::uint32_t parity) {
    known.wait(parity);
    std::int32_t all = 0;
    for (const std::int32_t one : special) all |= one;
    return all;
  }
};

/// True if some value in this warp's share of a tile is special. All watchers call it.
template <class Element>
[[nodiscard]] __device__ __forceinline__ bool watch_tile(const Element* tile, int elements) {
  const int thread = static_cast<int>(threadIdx.x) - 32;
  return __any_sync(0xffffffff, any_special<Element, 32 * kWatchers>(tile, elements, thread)) != 0;
}

/// Called by each thread of a watcher.
__device__ __forceinline__ void pass_verdict(Verdict& verdict, std::int32_t special,
                                             hopper::Barrier& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    verdict.special[threadIdx.x / 32 - 1] = special;
    verdict.known.arrive();
    empty.arrive();
  }
}

/// True if bias or dense mask may hide any pair.
template <class Tiles>
[[nodiscard]] __device__ __forceinline__ bool has_scores(const Arguments& a) {
  return Tiles::kGeneral && (a.scores.bias.data != nullptr || a.scores.mask.data != nullptr);
}

/// Starts to load a tile of kDim dims.
template <int kDim, class Element>
__device__ __forceinline__ void copy_tile(Element* to, const CUtensorMap& from,
                                          hopper::Barrier& barrier, hopper::Cache cache,
                                          std::int32_t first_row, std::int32_t head,
                                          std::int32_t batch) {
#pragma unroll
  for (int dim = 0; dim < kDim; dim += 64) {
    hopper::copy_box(to + 64 * dim, &from, barrier, cache, dim, first_row, head, batch);
  }
}

/// The common part of the computing warpgroups of both kernels. Score 4n + 2h + e of a thread is
/// that of row 16 (warp % 4) + lane / 4 + 8h and column 8n + 2 (lane % 4) + e of a tile. Rows may
/// be queries or keys, and columns the other.
template <class Tiles>
class WideConsumer {
 protected:
  using Element = typename Tiles::Element;
  static constexpr int kScores = 32;
  static constexpr int kPacked = kScores / 2;
  static constexpr bool kGeneral = Tiles::kGeneral;

  __device__ __forceinline__ explicit WideConsumer(const Arguments& arguments) : a(arguments) {
    warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32 - 4, 0);
    lane = static_cast<int>(threadIdx.x) % 32;
  }

  [[nodiscard]] __device__ __forceinline__ int first_row() const {
    return warp % 4 * 16 + lane / 4;
  }

  // product = A·Bᵀ of two tiles, kDim deep.
  template <int kDim>
  __device__ __forceinline__ static void issue_scores(float (&product)[kScores],
                                                      const Element* rows, const Element* columns) {
    using ScoreProduct = hopper::Product<Element, 64>;
    const std::uint64_t left = hopper::operand_descriptor(rows);
    const std::uint64_t right = hopper::operand_descriptor(columns);
#pragma unroll
    for (int dim = 0; dim < kDim; dim += 16) {
      const std::uint32_t offset = dim / 64 * (64 * 128) + dim % 64 * 2;
      const std::uint64_t l = hopper::advance(left, offset);
      const std::uint64_t r = hopper::advance(right, offset);
      if (dim == 0) {
        ScoreProduct::template shared_times_shared<false>(product, l, r);
      } else {
        ScoreProduct::template shared_times_shared<true>(product, l, r);
      }
    }
    hopper::products_commit();
  }

  // sum += weights·columns.
  template <int kSums>
  __device__ __forceinline__ static void issue_sum(float (&sum)[kSums],
                                                   const std::uint32_t (&weights)[kPacked],
                                                   const Element* columns) {
    // 192 dims are three times 64.
    constexpr int kPart = kSums == 96 ? 32 : kSums;
    using SumProduct = hopper::Product<Element, 2 * kPart>;
    const std::uint64_t right = hopper::operand_descriptor(columns, 64 * 128);
#pragma unroll
    for (int column = 0; column < 64; column += 16) {
      const int i = column / 4;
#pragma unroll
      for (int part = 0; part < kSums; part += kPart) {
        const std::uint32_t offset = column * 128 + part / 32 * (64 * 128);
        SumProduct::registers_times_shared(reinterpret_cast<float(&)[kPart]>(sum[part]), weights[i],
                                           weights[i + 1], weights[i + 2], weights[i + 3],
                                           hopper::advance(right, offset), 1);
      }
    }
    hopper::products_commit();
  }

  // This is issue_sum(), but it calls meanwhile() and waits for the sum. If `special`, pairs whose
  // bit in hidden() is set are skipped, not multiplied by 0.
  template <int kSums, class Hidden, class Meanwhile>
  __device__ __forceinline__ void add_to(float (&sum)[kSums], std::uint32_t (&weights)[kPacked],
                                         const Element* columns, bool special, const Hidden& hidden,
                                         const Meanwhile& meanwhile) const {
    if (special) {
      add_visible(sum, weights, hidden(), columns);
      meanwhile();
      return;
    }
    hopper::pin(weights);
    hopper::pin(sum);
    hopper::products_begin();
    issue_sum(sum, weights, columns);
    meanwhile();
    hopper::products_wait<0>();
    hopper::pin(sum);
    hopper::pin(weights);
  }

  template <int kSums, class Hidden>
  __device__ __forceinline__ void add_to(float (&sum)[kSums], std::uint32_t (&weights)[kPacked],
                                         const Element* columns, bool special,
                                         const Hidden& hidden) const {
    add_to(sum, weights, columns, special, hidden, [] {});
  }

  // The same pair by pair. Called by all threads of a warp.
  template <int kSums>
  __device__ __forceinline__ void add_visible(float (&sum)[kSums],
                                              const std::uint32_t (&weights)[kPacked],
                                              std::uint32_t hidden, const Element* columns) const {
#pragma unroll 1
    for (int next = 0; next < 64; ++next) {
      int column = next;
      // The compiler would otherwise keep an address for each column in registers.
      asm volatile("" : "+r"(column));
      const int owner = lane / 4 * 4 + column % 8 / 2;
      const int first_bit = column / 8 * 4 + column % 2;
      const std::uint32_t bits = __shfl_sync(0xffffffff, hidden, owner) >> first_bit;
      float weight[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        std::uint32_t pair = 0;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          if (n == column / 8) pair = weights[2 * n + h];
        }
        const float2 both = unpack(__shfl_sync(0xffffffff, pair, owner));
        weight[h] = column % 2 == 0 ? both.x : both.y;
      }
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        const Element* const pair =
            columns + i / 8 * (64 * 64) + column * 64 + (i % 8 ^ column % 8) * 8 + lane % 4 * 2;
        const float2 x = unpack(*reinterpret_cast<const std::uint32_t*>(pair));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const bool sees = (bits >> 2 * h & 1) == 0;
          float(&to)[2] = reinterpret_cast<float(&)[2]>(sum[4 * i + 2 * h]);
          to[0] = fmaf(weight[h], sees ? x.x : 0, to[0]);
          to[1] = fmaf(weight[h], sees ? x.y : 0, to[1]);
        }
      }
    }
  }

  [[nodiscard]] __device__ __forceinline__ static float2 unpack(std::uint32_t pair) {
    if constexpr (std::is_same_v<Element, __half>) {
      return __half22float2(reinterpret_cast<const __half2&>(pair));
    } else {
      return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
    }
  }

  // Values −0 of the pair become 0.
  [[nodiscard]] __device__ __forceinline__ static std::uint32_t plus_zero(std::uint32_t pair) {
    if constexpr (std::is_same_v<Element, __half>) {
      const __half2 sum = __hadd2_rn(reinterpret_cast<const __half2&>(pair), __half2{});
      return reinterpret_cast<const std::uint32_t&>(sum);
    } else {
      const __nv_bfloat162 sum =
          __hadd2_rn(reinterpret_cast<const __nv_bfloat162&>(pair), __nv_bfloat162{});
      return reinterpret_cast<const std::uint32_t&>(sum);
    }
  }

  // 16 bits for each score of a packed pair, all set if the score's bit in `bits` is set.
  [[nodiscard]] __device__ __forceinline__ static std::uint32_t halves(std::uint32_t bits,
                                                                       int pair) {
    return ((bits >> 2 * pair & 1) != 0 ? 0xffffU : 0U) |
           ((bits >> (2 * pair + 1) & 1) != 0 ? 0xffff0000U : 0U);
  }

  // Packs the weights of scores, and replaces the scores by their weights times the soft cap's
  // derivative. lse(n) returns two LSEs: of scores 4n and 4n + 2, and of scores 4n + 1 and 4n + 3.
  template <class Lse>
  __device__ __forceinline__ void weigh(float (&scores)[kScores], std::uint32_t (&weights)[kPacked],
                                        const Lse& lse) const {
    constexpr float kUnit = kGeneral ? 1 : kLog2E;
    if (a.soft_cap != 0) {
      replace_by_tanh(scores, a);
      weigh<true>(scores, weights, lse, a.soft_cap * kUnit);
    } else {
      // Scores with a bias are logits already.
      weigh<false>(scores, weights, lse,
                   kGeneral && a.scores.bias.data != nullptr ? 1 : a.scale * kUnit);
    }
  }
  template <bool kSoftCap, class Lse>
  __device__ __forceinline__ static void weigh(float (&scores)[kScores],
                                               std::uint32_t (&weights)[kPacked], const Lse& lse,
                                               float unit) {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const float2 shift = lse(i / 4);
      // The LSE of the general class is natural, so that large biases do not overflow before they
      // cancel.
      constexpr float kToLog2 = kGeneral ? kLog2E : 1;
      const float x = exp2_fast(fmaf(scores[i], unit, -shift.x) * kToLog2);
      const float y = exp2_fast(fmaf(scores[i + 1], unit, -shift.y) * kToLog2);
      weights[i / 2] = pack<Element>(x, y);
      scores[i] = kSoftCap ? x * fmaf(-scores[i], scores[i], 1) : x;
      scores[i + 1] = kSoftCap ? y * fmaf(-scores[i + 1], scores[i + 1], 1) : y;
    }
  }

  // Turns products into logits, and adds the bits of pairs that the bias hides.
  __device__ __forceinline__ void add_bias(float (&scores)[kScores], const float (&bias)[kScores],
                                           std::uint32_t& hidden) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (bias[i] == -kInfinity) hidden |= 1U << i;
      scores[i] = fmaf(scores[i], a.scale, bias[i]);
    }
  }

  // The factor of dO·Vᵀ for pairs that dropout keeps.
  [[nodiscard]] __device__ __forceinline__ float grad_factor() const {
    return kGeneral ? a.value_scale : 1;
  }

  __device__ __forceinline__ void release(hopper::Barrier& barrier) const {
    __syncwarp();
    if (lane == 0) barrier.arrive();
  }

  const Arguments& a;
  int warp, lane;
};

}  // namespace annulus::flash::backward
