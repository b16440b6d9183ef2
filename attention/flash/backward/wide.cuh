#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "flash/backward/kernel.cuh"

namespace annulus::flash::backward {

/// Tiles of the kernel for wide heads. The first warpgroup computes weights and dV, the second dS
/// and dK, so that each sum of 64 keys fits in the registers of one; a third loads.
template <class Element_, int kDim_, int kValueDim_>
struct WideTiles : Tiles<Element_, kDim_> {
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kKeys = kWideTileKeys;
  static constexpr int kOutputElements = Tiles<Element_, kDim_>::kQueries * kValueDim;
};

template <class Tiles>
struct WideSharedTiles {
  using Element = typename Tiles::Element;
  alignas(1024) Element key[Tiles::kKeys * Tiles::kDim];
  alignas(1024) Element value[Tiles::kKeys * Tiles::kValueDim];
  alignas(1024) Element query[Tiles::kStages][Tiles::kTileElements];
  alignas(1024) Element grad_output[Tiles::kStages][Tiles::kOutputElements];
  /// Pᵀ, and then dSᵀ in its place: a row of 128 bytes for each key. Two, so that dQ can be
  /// computed while the next tile's P is.
  alignas(1024) Element scores[2][Tiles::kKeys * Tiles::kQueries];
  alignas(1024) float grad_query[8][kWideSumRows * 32];  ///< dQ of each warp: a box
  alignas(128) float lse[Tiles::kStages][Tiles::kQueries + kFlagValues];
  alignas(128) float delta[Tiles::kStages][Tiles::kQueries];
  Work<Tiles> work;
  std::int32_t special_keys;  ///< keys or values are special
  hopper::Barrier key_full, key_watched;
  hopper::Barrier query_full[Tiles::kStages], query_empty[Tiles::kStages];
  hopper::Barrier output_full[Tiles::kStages], output_empty[Tiles::kStages];
};

template <class Tiles>
__device__ __forceinline__ void produce(const Arguments& a, WideSharedTiles<Tiles>& shared) {
  const Work<Tiles>& work = shared.work;
  using hopper::Cache;
  using hopper::copy_box;
  constexpr std::int32_t kQueries = Tiles::kQueries, kKeys = Tiles::kKeys;
  constexpr std::int32_t kRecord = kQueries + kFlagValues;
  shared.key_full.arrive_expecting(kKeys * (Tiles::kDim + Tiles::kValueDim) * 2);
#pragma unroll
  for (int dim = 0; dim < Tiles::kDim; dim += 64) {
    copy_box(shared.key + kKeys * dim, &a.key, shared.key_full, Cache::evict_first, dim,
             work.first_column, work.kv_head, work.batch);
  }
#pragma unroll
  for (int dim = 0; dim < Tiles::kValueDim; dim += 64) {
    copy_box(shared.value + kKeys * dim, &a.value, shared.key_full, Cache::evict_first, dim,
             work.first_column, work.kv_head, work.batch);
  }
  RingPosition<Tiles::kStages> at;
  for (std::int32_t i = 0; i < a.heads_per_kv_head; ++i) {
    const std::int32_t head = work.kv_head * a.heads_per_kv_head + i;
    const std::int64_t first_value = (std::int64_t{work.batch} * a.heads + head) * a.padded_rows;
    for (std::int32_t tile = work.first_tile; tile <= work.last_tile; ++tile, at.next()) {
      const std::int32_t slot = at.slot();
      const std::int32_t row = tile * kQueries;
      shared.query_empty[slot].wait(at.parity() ^ 1);
      shared.query_full[slot].arrive_expecting(Tiles::kTileElements * 2 + kRecord * 4);
#pragma unroll
      for (int dim = 0; dim < Tiles::kDim; dim += 64) {
        copy_box(shared.query[slot] + kQueries * dim, &a.query, shared.query_full[slot],
                 Cache::evict_last, dim, row, head, work.batch);
      }
      copy_bytes(shared.lse[slot], a.scaled_lse + (first_value + row) / kQueries * kRecord,
                 kRecord * 4, shared.query_full[slot]);
      shared.output_empty[slot].wait(at.parity() ^ 1);
      shared.output_full[slot].arrive_expecting(Tiles::kOutputElements * 2 + kQueries * 4);
#pragma unroll
      for (int dim = 0; dim < Tiles::kValueDim; dim += 64) {
        copy_box(shared.grad_output[slot] + kQueries * dim, &a.grad_output,
                 shared.output_full[slot], Cache::evict_last, dim, row, head, work.batch);
      }
      copy_bytes(shared.delta[slot], a.padded_delta + first_value + row, kQueries * 4,
                 shared.output_full[slot]);
    }
  }
}

/// By the threads of three warps.
template <class Tiles>
__device__ __forceinline__ void watch_keys(WideSharedTiles<Tiles>& shared, int thread) {
  using Element = typename Tiles::Element;
  shared.key_full.wait(0);
  const bool special =
      any_special<Element, 96>(shared.key, Tiles::kKeys * Tiles::kDim, thread) ||
      any_special<Element, 96>(shared.value, Tiles::kKeys * Tiles::kValueDim, thread);
  if (special) atomicOr(&shared.special_keys, 1);
  shared.key_watched.arrive();
}

/// The two warpgroups that compute. Of dQ the first has the dims up to 128, a query tile late, since
/// dS comes from the second.
template <class Tiles>
class WideConsumer {
  using Element = typename Tiles::Element;
  static constexpr int kScores = 32;
  static constexpr int kPacked = kScores / 2;
  // Named barriers.
  static constexpr int kTileSync = 1;  // of all, as the next
  static constexpr int kSpecialSync = 2;
  static constexpr int kWeightsReady = 3;  // the second waits for the first
  static constexpr int kGradsReady = 4;    // the first waits for the second
  static constexpr int kGradsStored = 5;   // of the second
  using ScoreProduct = hopper::Product<Element, Tiles::kQueries>;
  using QueryProduct = hopper::Product<Element, 64>;

 public:
  __device__ __forceinline__ WideConsumer(const Arguments& arguments,
                                          WideSharedTiles<Tiles>& memory)
      : a(arguments), work(memory.work), shared(memory) {
    warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32 - 4, 0);
    lane = static_cast<int>(threadIdx.x) % 32;
  }

  /// The first warpgroup's part.
  __device__ __forceinline__ void run_weights() {
    float sum[Tiles::kValueDim / 2];
#pragma unroll
    for (float& x : sum) x = 0;
    TileOfHead before{-1, 0};  // what dS belongs to
    shared.key_full.wait(0);
    for (std::int32_t i = 0; i < a.heads_per_kv_head; ++i) {
      const std::int32_t head = work.kv_head * a.heads_per_kv_head + i;
      for (std::int32_t tile = work.first_tile; tile <= work.last_tile; ++tile, at.next()) {
        add_weights({tile * Tiles::kQueries, head}, before, sum);
      }
    }
    hopper::named_sync(kGradsReady, 256);
    const Element* const grads = shared.scores[(steps + 1) % 2];
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      float query_sum[kScores];
      hopper::leave_undefined(query_sum);
      hopper::products_begin();
      issue_query(query_sum, grads, piece);
      hopper::products_wait<0>();
      hopper::pin(query_sum);
      add_query(before, piece, query_sum);
    }
    add(a.grad_value, sum, 1);
    wait_for_query();
  }

  /// The second's.
  __device__ __forceinline__ void run_scores() {
    float sum[Tiles::kDim / 2];
#pragma unroll
    for (float& x : sum) x = 0;
    shared.key_full.wait(0);
    hopper::named_arrive(kGradsReady, 256);  // of no tile
    for (std::int32_t i = 0; i < a.heads_per_kv_head; ++i) {
      const std::int32_t head = work.kv_head * a.heads_per_kv_head + i;
      for (std::int32_t tile = work.first_tile; tile <= work.last_tile; ++tile, at.next()) {
        add_scores({tile * Tiles::kQueries, head}, sum);
      }
    }
    add(a.grad_key, sum, Tiles::sum_scale(a));
    wait_for_query();
  }

 private:
  struct TileOfHead {
    std::int32_t row;  // the first; below 0: none
    std::int32_t head;
  };

  // product = A·Bᵀ of the keys and a tile of rows, kDim deep.
  template <int kDim>
  __device__ __forceinline__ static void issue_scores(float (&product)[kScores],
                                                      const Element* keys, const Element* rows) {
    const std::uint64_t left = hopper::operand_descriptor(keys);
    const std::uint64_t right = hopper::operand_descriptor(rows);
#pragma unroll
    for (int dim = 0; dim < kDim; dim += 16) {
      const std::uint32_t inside = dim % 64 * 2;
      const std::uint64_t l = hopper::advance(left, dim / 64 * (Tiles::kKeys * 128) + inside);
      const std::uint64_t r = hopper::advance(right, dim / 64 * (Tiles::kQueries * 128) + inside);
      if (dim == 0) {
        ScoreProduct::template shared_times_shared<false>(product, l, r);
      } else {
        ScoreProduct::template shared_times_shared<true>(product, l, r);
      }
    }
    hopper::products_commit();
  }

  // sum += weights·rows.
  template <int kSums>
  __device__ __forceinline__ static void issue_sum(float (&sum)[kSums],
                                                   const std::uint32_t (&weights)[kPacked],
                                                   const Element* rows) {
    // 192 columns are three times 64.
    constexpr int kPart = kSums == 96 ? 32 : kSums;
    using SumProduct = hopper::Product<Element, 2 * kPart>;
    const std::uint64_t right = hopper::operand_descriptor(rows, Tiles::kQueries * 128);
#pragma unroll
    for (int row = 0; row < Tiles::kQueries; row += 16) {
      const int i = row / 4;
#pragma unroll
      for (int part = 0; part < kSums; part += kPart) {
        const std::uint32_t offset = row * 128 + part / 32 * (Tiles::kQueries * 128);
        SumProduct::registers_times_shared(reinterpret_cast<float(&)[kPart]>(sum[part]), weights[i],
                                           weights[i + 1], weights[i + 2], weights[i + 3],
                                           hopper::advance(right, offset), 1);
      }
    }
    hopper::products_commit();
  }

  // 64 dims of dQ = dS·K.
  __device__ __forceinline__ void issue_query(float (&sum)[kScores], const Element* grads,
                                              int piece) const {
    const std::uint64_t left = hopper::operand_descriptor(grads);
    const std::uint64_t right = hopper::operand_descriptor(shared.key + piece * Tiles::kKeys * 64);
#pragma unroll
    for (int key = 0; key < Tiles::kKeys; key += 16) {
      const std::uint64_t l = hopper::advance(left, key * 128);
      const std::uint64_t r = hopper::advance(right, key * 128);
      if (key == 0) {
        QueryProduct::template transposed_times_shared<false>(sum, l, r);
      } else {
        QueryProduct::template transposed_times_shared<true>(sum, l, r);
      }
    }
    hopper::products_commit();
  }

  // True if some pair of a tile is hidden.
  [[nodiscard]] __device__ __forceinline__ bool is_masked(std::int32_t row) const {
    return work.first_column + Tiles::kKeys - 1 - row > a.high ||
           work.first_column - (row + Tiles::kQueries - 1) < a.low ||
           work.first_column + Tiles::kKeys > work.columns;
  }

  __device__ __forceinline__ void hide(float (&weights)[kScores], std::int32_t row) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int32_t column = work.first_column + warp % 4 * 16 + lane / 4 + 8 * h;
      const std::int32_t distance = column - (row + 2 * (lane % 4));
      const std::int32_t low = column < work.columns ? a.low : 0x7fffffff;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        const std::int32_t x = distance - (i / 2 * 8 + i % 2);
        if (x < low || x > a.high) weights[i / 2 * 4 + 2 * h + i % 2] = 0;
      }
    }
  }

  // Computes a tile pair by pair if it has hidden pairs and its products would read special values;
  // then true. By both warpgroups, once its queries and dO are there.
  [[nodiscard]] __device__ __forceinline__ bool is_left_to_pairs(const TileOfHead& tile) {
    const std::uint32_t slot = at.slot();
    const std::int32_t flags = __float_as_int(shared.lse[slot][Tiles::kQueries]);
    if (!is_masked(tile.row) && (flags & kHiddenRows) == 0) return false;
    shared.output_full[slot].wait(at.parity());
    shared.key_watched.wait(0);
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const bool special =
        (flags & kSpecialValues) != 0 || shared.special_keys != 0 ||
        any_special<Element, 256>(shared.query[slot], Tiles::kTileElements, thread) ||
        any_special<Element, 256>(shared.grad_output[slot], Tiles::kOutputElements, thread);
    if (!any_of_threads<256>(kSpecialSync, special)) return false;
    differentiate_pairs(tile);
    release(shared.output_empty[slot]);
    release(shared.query_empty[slot]);
    return true;
  }

  // A warp per row.
  __device__ __forceinline__ void differentiate_pairs(const TileOfHead& tile) const {
    constexpr int kParts = Tiles::kDim / 64, kValueParts = Tiles::kValueDim / 64;
    const std::uint32_t slot = at.slot();
#pragma unroll 1
    for (int r = warp; r < Tiles::kQueries; r += 8) {
      const float lse = shared.lse[slot][r], delta = shared.delta[slot][r];
      if (lse == kInfinity) continue;
      float2 query_sum[kParts] = {};
#pragma unroll 1
      for (int k = 0; k < Tiles::kKeys; ++k) {
        const std::int32_t column = work.first_column + k;
        const std::int32_t distance = column - tile.row - r;
        if (column >= work.columns || distance < a.low || distance > a.high) continue;
        float score = 0, grad = 0;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const int dim = 64 * i + 2 * lane;
          const float2 q = swizzled_pair<Tiles::kQueries>(shared.query[slot], r, dim);
          const float2 x = swizzled_pair<Tiles::kKeys>(shared.key, k, dim);
          score = fmaf(q.x, x.x, fmaf(q.y, x.y, score));
        }
#pragma unroll
        for (int i = 0; i < kValueParts; ++i) {
          const int dim = 64 * i + 2 * lane;
          const float2 g = swizzled_pair<Tiles::kQueries>(shared.grad_output[slot], r, dim);
          const float2 v = swizzled_pair<Tiles::kKeys>(shared.value, k, dim);
          grad = fmaf(g.x, v.x, fmaf(g.y, v.y, grad));
        }
#pragma unroll
        for (int other = 16; other > 0; other /= 2) {
          score += __shfl_xor_sync(0xffffffff, score, other);
          grad += __shfl_xor_sync(0xffffffff, grad, other);
        }
        const float weight = exp2_fast(fmaf(score, a.scale * kLog2E, -lse));
        const float grad_score = weight * fmaf(grad, Tiles::score_scale(a), -delta);
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const int dim = 64 * i + 2 * lane;
          const float2 x = swizzled_pair<Tiles::kKeys>(shared.key, k, dim);
          query_sum[i].x += grad_score * x.x;
          query_sum[i].y += grad_score * x.y;
          const float2 q = swizzled_pair<Tiles::kQueries>(shared.query[slot], r, dim);
          add_atomically(a.grad_key, column, work.kv_head, dim, Tiles::sum_scale(a) * grad_score,
                         q);
        }
#pragma unroll
        for (int i = 0; i < kValueParts; ++i) {
          const int dim = 64 * i + 2 * lane;
          const float2 g = swizzled_pair<Tiles::kQueries>(shared.grad_output[slot], r, dim);
          add_atomically(a.grad_value, column, work.kv_head, dim, weight, g);
        }
      }
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        add_atomically(a.grad_query, tile.row + r, tile.head, 64 * i + 2 * lane,
                       Tiles::sum_scale(a), query_sum[i]);
      }
    }
    __threadfence();  // another thread adds to the gradients in add()
    hopper::named_sync(kTileSync, 256);
  }

  __device__ __forceinline__ void add_atomically(const Gradient& to, std::int32_t token,
                                                 std::int32_t head, int dim, float factor,
                                                 float2 pair) const {
    if (to.data == nullptr || dim >= to.dim) return;
    float* const sum = to.data + work.batch * to.strides.batch + token * to.strides.sequence +
                       head * to.strides.head + dim;
    atomicAdd(sum, factor * pair.x);
    atomicAdd(sum + 1, factor * pair.y);
  }

  // Where matrix l / 8 of this lane l has its row l % 8: keys 0 and 8, queries 0 and 8 from
  // `query` on.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t score_address(const Element* scores,
                                                                       int query) const {
    const int key = warp % 4 * 16 + lane % 16;
    const int chunk = (query / 8 + lane / 16) ^ (key % 8);
    return hopper::shared_address(scores) + key * 128 + chunk * 16;
  }
  __device__ __forceinline__ void store_scores(Element* to,
                                               const std::uint32_t (&packed)[kPacked]) const {
#pragma unroll
    for (int i = 0; i < kPacked; i += 4) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       score_address(to, 4 * i)),
                   "r"(packed[i]), "r"(packed[i + 1]), "r"(packed[i + 2]), "r"(packed[i + 3])
                   : "memory");
    }
  }
  __device__ __forceinline__ void load_scores(std::uint32_t (&packed)[kPacked],
                                              const Element* from) const {
#pragma unroll
    for (int i = 0; i < kPacked; i += 4) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(packed[i]), "=r"(packed[i + 1]), "=r"(packed[i + 2]), "=r"(packed[i + 3])
                   : "r"(score_address(from, 4 * i))
                   : "memory");
    }
  }
  [[nodiscard]] __device__ __forceinline__ static float2 unpack(std::uint32_t pair) {
    if constexpr (std::is_same_v<Element, __half>) {
      return __half22float2(reinterpret_cast<const __half2&>(pair));
    } else {
      return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
    }
  }

  // TMA adds the warp's 16 rows of 64 dims of dQ, 32 dims at a time, swizzled as they lie in shared
  // memory.
  __device__ __forceinline__ void add_query(const TileOfHead& tile, int piece,
                                            const float (&sum)[kScores]) const {
    if (a.grad_query.data == nullptr) return;
    float* const box = shared.grad_query[warp];
    const float scale = Tiles::sum_scale(a);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      __syncwarp();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = lane / 4 + 8 * h;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int chunk = (2 * i + lane % 4 / 2) ^ (row % 8);
          const int j = 16 * half + 4 * i + 2 * h;
          *reinterpret_cast<float2*>(box + row * 32 + chunk * 4 + lane % 2 * 2) =
              float2{scale * sum[j], scale * sum[j + 1]};
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0 && tile.row >= 0) {
        hopper::add_box(&a.query_sum, box, piece * 64 + half * 32, tile.row + warp % 4 * 16,
                        tile.head, work.batch);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
  }

  __device__ __forceinline__ void wait_for_query() const {
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }

  __device__ __forceinline__ void release(hopper::Barrier& barrier) const {
    if (lane == 0) barrier.arrive();
  }

  template <int kSums>
  __device__ __forceinline__ void add_weights(const TileOfHead& tile, TileOfHead& before,
                                              float (&sum)[kSums]) {
    const std::uint32_t slot = at.slot();
    // Not known to be the same in every step, or what follows from it would fill registers.
    asm volatile("" : "+r"(warp), "+r"(lane));
    shared.query_full[slot].wait(at.parity());
    if (is_left_to_pairs(tile)) return;
    float scores[kScores];
    hopper::leave_undefined(scores);
    hopper::products_begin();
    issue_scores<Tiles::kDim>(scores, shared.key, shared.query[slot]);
    hopper::named_sync(kGradsReady, 256);
    Element* const weights_to = shared.scores[steps % 2];
    const Element* const grads = shared.scores[(steps + 1) % 2];
    float first_sum[kScores], second_sum[kScores];
    hopper::leave_undefined(first_sum);
    hopper::products_begin();
    issue_query(first_sum, grads, 0);
    hopper::products_wait<1>();
    hopper::pin(scores);
    const float scale = a.scale * kLog2E;
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float2 lse =
          *reinterpret_cast<const float2*>(&shared.lse[slot][8 * i + 2 * (lane % 4)]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scores[4 * i + 2 * h] = exp2_fast(fmaf(scores[4 * i + 2 * h], scale, -lse.x));
        scores[4 * i + 2 * h + 1] = exp2_fast(fmaf(scores[4 * i + 2 * h + 1], scale, -lse.y));
      }
    }
    if (is_masked(tile.row)) hide(scores, tile.row);
    std::uint32_t weights[kPacked];
#pragma unroll
    for (int i = 0; i < kScores; i += 2) weights[i / 2] = pack<Element>(scores[i], scores[i + 1]);
    store_scores(weights_to, weights);
    release(shared.query_empty[slot]);
    hopper::named_arrive(kWeightsReady, 256);
    shared.output_full[slot].wait(at.parity());
    hopper::pin(weights);
    hopper::pin(sum);
    hopper::leave_undefined(second_sum);
    hopper::products_begin();
    issue_query(second_sum, grads, 1);
    issue_sum(sum, weights, shared.grad_output[slot]);
    hopper::products_wait<2>();
    hopper::pin(first_sum);
    add_query(before, 0, first_sum);
    hopper::products_wait<1>();
    hopper::pin(second_sum);
    add_query(before, 1, second_sum);
    hopper::products_wait<0>();
    hopper::pin(sum);
    hopper::pin(weights);
    release(shared.output_empty[slot]);
    before = tile;
    ++steps;
  }

  template <int kSums>
  __device__ __forceinline__ void add_scores(const TileOfHead& tile, float (&sum)[kSums]) {
    constexpr int kLastPiece = Tiles::kDim / 64 - 1;
    const std::uint32_t slot = at.slot();
    asm volatile("" : "+r"(warp), "+r"(lane));
    shared.query_full[slot].wait(at.parity());
    if (is_left_to_pairs(tile)) return;
    float grads[kScores];
    hopper::leave_undefined(grads);
    shared.output_full[slot].wait(at.parity());
    hopper::products_begin();
    issue_scores<Tiles::kValueDim>(grads, shared.value, shared.grad_output[slot]);
    hopper::products_wait<0>();
    hopper::pin(grads);
    hopper::named_sync(kWeightsReady, 256);
    Element* const scores = shared.scores[steps % 2];
    std::uint32_t packed[kPacked];
    load_scores(packed, scores);
    const float score_scale = Tiles::score_scale(a);
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float2 delta =
          *reinterpret_cast<const float2*>(&shared.delta[slot][8 * i + 2 * (lane % 4)]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = 4 * i + 2 * h;
        const float2 weight = unpack(packed[j / 2]);
        packed[j / 2] = pack<Element>(weight.x * fmaf(grads[j], score_scale, -delta.x),
                                      weight.y * fmaf(grads[j + 1], score_scale, -delta.y));
      }
    }
    store_scores(scores, packed);
    release(shared.output_empty[slot]);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    hopper::named_arrive(kGradsReady, 256);
    hopper::named_sync(kGradsStored, 128);
    hopper::pin(packed);
    hopper::pin(sum);
    float first_sum[kScores], last_sum[kScores];
    hopper::leave_undefined(last_sum);
    hopper::products_begin();
    if constexpr (kLastPiece == 3) {
      hopper::leave_undefined(first_sum);
      issue_query(first_sum, scores, 2);
    }
    issue_query(last_sum, scores, kLastPiece);
    issue_sum(sum, packed, shared.query[slot]);
    if constexpr (kLastPiece == 3) {
      hopper::products_wait<2>();
      hopper::pin(first_sum);
      add_query(tile, 2, first_sum);
    }
    hopper::products_wait<1>();
    hopper::pin(last_sum);
    add_query(tile, kLastPiece, last_sum);
    hopper::products_wait<0>();
    hopper::pin(sum);
    hopper::pin(packed);
    release(shared.query_empty[slot]);
    ++steps;
  }

  template <int kSums>
  __device__ __forceinline__ void add(const Gradient& to, const float (&sum)[kSums],
                                      float factor) const {
    if (to.data == nullptr) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int32_t column = work.first_column + warp % 4 * 16 + lane / 4 + 8 * h;
      if (column >= work.columns) continue;
      const int dim = 2 * (lane % 4);
      const std::int64_t start = work.batch * to.strides.batch + column * to.strides.sequence +
                                 work.kv_head * to.strides.head + dim;
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        if (8 * i + dim >= to.dim) continue;
        add_pair(to, start + 8 * i, factor * sum[4 * i + 2 * h], factor * sum[4 * i + 2 * h + 1]);
      }
    }
  }

  const Arguments& a;
  const Work<Tiles>& work;
  WideSharedTiles<Tiles>& shared;
  RingPosition<Tiles::kStages> at;
  std::uint32_t steps = 0;  // tiles that were not left to pairs
  int warp, lane;
};

/// Gradients of a key tile and a key/value head whose dK and dV do not both fit in the registers of
/// a warpgroup.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 1)
    differentiate_wide(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = *reinterpret_cast<WideSharedTiles<Tiles>*>(bytes);
  if (threadIdx.x == 0) {
    shared.work.find(a, static_cast<std::int32_t>(blockIdx.x));
    shared.special_keys = 0;
    shared.key_full.init(1);
    shared.key_watched.init(96);
    for (int i = 0; i < Tiles::kStages; ++i) {
      shared.query_full[i].init(1);
      shared.output_full[i].init(1);
      shared.query_empty[i].init(8);
      shared.output_empty[i].init(8);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (shared.work.last_tile < shared.work.first_tile) return;
  if (threadIdx.x < 128) {
    hopper::release_registers<24>();
    if (threadIdx.x == 0) {
      produce<Tiles>(a, shared);
    } else if (threadIdx.x >= 32) {
      watch_keys<Tiles>(shared, static_cast<int>(threadIdx.x) - 32);
    }
  } else {
    hopper::take_registers<240>();
    WideConsumer<Tiles> consumer(a, shared);
    if (threadIdx.x < 256) {
      consumer.run_weights();
    } else {
      consumer.run_scores();
    }
  }
}

template <class Tiles>
[[nodiscard]] cudaError_t launch_wide_tiles(const Arguments& a, unsigned items,
                                            cudaStream_t stream) {
  constexpr std::size_t kShared = sizeof(WideSharedTiles<Tiles>);
  if (const cudaError_t code = cudaFuncSetAttribute(
          differentiate_wide<Tiles>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)) {
    return code;
  }
  differentiate_wide<Tiles><<<items, Tiles::kThreads, kShared, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace annulus::flash::backward
