#pragma once

#include <cstddef>
#include <cstdint>

#include "flash/backward/consumer_weights.cuh"
#include "flash/backward/gradient.cuh"
#include "flash/hopper/tma.cuh"
#include "flash/hopper/wgmma.cuh"

namespace annulus::flash::backward {

/// One warpgroup's part: dK and dV of 64 keys, in registers until all queries of the group of heads
/// have been seen, and half of each query tile's dQ.
template <class Tiles>
class Consumer : ConsumerWeights<Tiles> {
  using Weights = ConsumerWeights<Tiles>;
  using typename Weights::Element;
  using typename Weights::Found;
  using typename Weights::Rows;
  using typename Weights::RowValues;
  using Weights::a;
  using Weights::at;
  using Weights::differentiate_pair;
  using Weights::drop;
  using Weights::find_pairs;
  using Weights::forget_place;
  using Weights::grad_factor;
  using Weights::group;
  using Weights::is_regular;
  using Weights::is_visible;
  using Weights::kGeneral;
  using Weights::kGroupSync;
  using Weights::kLists;
  using Weights::kScores;
  using Weights::kTileSync;
  using Weights::lane;
  using Weights::read_early;
  using Weights::release;
  using Weights::shared;
  using Weights::skip_scores;
  using Weights::store_bias_gradient;
  using Weights::values_of;
  using Weights::warp;
  using Weights::weigh;
  using Weights::work;
  static constexpr int kSums = Tiles::kDim / 2;
  static constexpr int kGroupBytes = 64 * 128;
  // Products may still be adding to a sum when the next step begins. Assemblers before CUDA 12.9
  // would make all products wait for each other then, whether the sum begins undefined or at 0.
  static constexpr bool kKeepsSums = __CUDACC_VER_MAJOR__ > 12 ||
                                     (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 9);
  // The general class at 128 dims lacks the registers to overlap steps.
  static constexpr bool kOverlaps = kKeepsSums && (Tiles::kDim == 64 || !kGeneral);
  static constexpr bool kSplitsDims = Tiles::kSplitsDims;
  static constexpr bool kSplitsKeys = Tiles::kSplitsKeys;
  static constexpr int kSumWarps = Tiles::kSumWarps;
  using ScoreProduct = hopper::Product<Element, Tiles::kQueries>;
  using SumProduct = hopper::Product<Element, Tiles::kDim>;
  using QueryProduct = hopper::Product<Element, 64>;

 public:
  __device__ __forceinline__ Consumer(const Arguments& arguments, SharedTiles<Tiles>& memory)
      : Weights(arguments, memory) {}

  __device__ __forceinline__ void run() {
    float key_sum[kSums], value_sum[kSums], query_sum[32];
    clear(value_sum);
    // Not set to 0: only products may write a sum that is still being added to when a step begins.
    if constexpr (kKeepsSums) hopper::leave_undefined(key_sum);
    if constexpr (!kKeepsSums) clear(key_sum);
    hopper::leave_undefined(query_sum);
    shared.key_full.wait(0);
    // Overlapping steps leave no register for the number of steps, so they read it each time.
    const std::uint32_t known = kOverlaps ? 0 : number_of_steps();
    while (at.count < (kOverlaps ? number_of_steps() : known)) step(key_sum, value_sum, query_sum);
    if constexpr (kOverlaps) finish<0>(key_sum, query_sum);
    if (kKeepsSums && sums_ == Sums::none) clear(key_sum);
    add(key_sum, value_sum);
  }

 private:
  [[nodiscard]] __device__ __forceinline__ std::uint32_t number_of_steps() const {
    return hopper::uniform(static_cast<std::uint32_t>(shared.steps));
  }
  __device__ __forceinline__ static void clear(float (&sum)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] = 0;
  }

  // Descriptors of operands are counted from these (see hopper::uniform()). `all`: the start of
  // shared memory. `group`: the same, but 64 rows of 128 bytes further on for the second warpgroup.
  // `slot`: the step's slot in rings.
  struct Start {
    std::uint64_t all, group;
    std::uint32_t slot;
  };
  [[nodiscard]] __device__ __forceinline__ Start start() const {
    const std::uint64_t all = hopper::operand_descriptor(&shared, 0);
    return {hopper::uniform(all), hopper::uniform(hopper::advance(all, group * kGroupBytes)),
            hopper::uniform(at.slot())};
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t offset_of(const void* member) const {
    return static_cast<std::uint32_t>(static_cast<const std::byte*>(member) -
                                      reinterpret_cast<const std::byte*>(&shared));
  }
  // The step's tile of a ring.
  template <int kSlots, int kElements>
  [[nodiscard]] __device__ __forceinline__ std::uint64_t in_slot(
      std::uint64_t from, std::uint32_t slot, const Element (&ring)[kSlots][kElements]) const {
    return hopper::advance(from, offset_of(ring) + slot * (kElements * 2));
  }

  // product = A·Bᵀ of this warpgroup's 64 keys and a tile of rows.
  __device__ __forceinline__ static void issue_scores(float (&product)[kScores], std::uint64_t keys,
                                                      std::uint64_t rows) {
#pragma unroll
    for (int dim = 0; dim < Tiles::kDim; dim += 16) {
      const std::uint32_t inside = dim % 64 * 2;
      const std::uint64_t l = hopper::advance(keys, dim / 64 * (Tiles::kKeys * 128) + inside);
      const std::uint64_t r = hopper::advance(rows, dim / 64 * (Tiles::kQueries * 128) + inside);
      if (dim == 0) {
        ScoreProduct::template shared_times_shared<false>(product, l, r);
      } else {
        ScoreProduct::template shared_times_shared<true>(product, l, r);
      }
    }
    hopper::products_commit();
  }

  // sum += weights·rows, or, if `add` is 0, sum = weights·rows.
  __device__ __forceinline__ static void issue_sum(float (&sum)[kSums],
                                                   const std::uint32_t (&weights)[kScores / 2],
                                                   std::uint64_t rows, int add) {
    const std::uint64_t right = rows + hopper::wide_step_in_descriptor(Tiles::kQueries * 128);
#pragma unroll
    for (int row = 0; row < Tiles::kQueries; row += 16) {
      const int i = row / 4;
      SumProduct::registers_times_shared(sum, weights[i], weights[i + 1], weights[i + 2],
                                         weights[i + 3], hopper::advance(right, row * 128),
                                         row == 0 ? add : 1);
    }
    hopper::products_commit();
  }

  // This warpgroup's 64 × 64 part of dQᵀ = Kᵀ·dSᵀ: half of the dims, of the queries or of the keys.
  // As it is transposed, threads of a warp hold neighbouring dims, which lie in different banks.
  __device__ __forceinline__ void issue_query(float (&sum)[32], const Start& from) const {
    constexpr int kKeys = kSplitsKeys ? 64 : Tiles::kKeys;
    // The second group's part begins kKeys rows further on; from.group has moved only 64.
    const std::uint64_t part = from.all + kKeys / 64 * (from.group - from.all);
    const std::uint64_t left =
        hopper::advance(kSplitsDims || kSplitsKeys ? part : from.all, offset_of(shared.key));
    const std::uint64_t right =
        in_slot(kSplitsDims ? from.all : part, from.slot, shared.grad_score);
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
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

  // Ends the step before `at`, if there is one that has not ended: hands over its dQ while its dK
  // is computed, and waits for dK. kLater: groups of products that were issued since.
  template <int kLater>
  __device__ __forceinline__ void finish(float (&key_sum)[kSums], const float (&query_sum)[32]) {
    const std::uint32_t before = at.count - 1;
    if (sums_ == Sums::unfinished) add_query(query_sum, before);
    hopper::products_wait<kLater>();
    hopper::pin(key_sum);
    if (sums_ == Sums::unfinished) {
      release(shared.query_empty[before % Tiles::kStages]);
      sums_ = Sums::finished;
    }
  }

  // If kOverlaps, a step ends once the next one's first product is issued, so that tensor cores
  // have work while its dQ is handed over.
  __device__ __forceinline__ void step(float (&key_sum)[kSums], float (&value_sum)[kSums],
                                       float (&query_sum)[32]) {
    // Hides from the compiler that these are the same in every step: it would keep values derived
    // from them in registers.
    asm volatile("" : "+r"(warp), "+r"(lane));
    const Start from = start();
    Rows rows;
    const bool regular = __any_sync(0xffffffff, is_regular(rows) ? 1 : 0) != 0;
    const std::int32_t row = shared.step[at.slot()].tile * Tiles::kQueries;
    const float factor = grad_factor();
    const std::uint64_t query = in_slot(from.all, from.slot, shared.query);
    const std::uint64_t grad_output = in_slot(from.all, from.slot, shared.grad_output);
    float scores[kScores], grads[kScores];
    std::uint32_t weights[kScores / 2], packed[kScores / 2];
    hopper::leave_undefined(scores);
    hopper::leave_undefined(grads);
    hopper::products_begin();
    issue_scores(scores, hopper::advance(from.group, offset_of(shared.key)), query);
    if constexpr (kOverlaps) finish<1>(key_sum, query_sum);
    if (!regular) {
      hopper::products_wait<0>();
      hopper::pin(scores);
      if constexpr (kGeneral) skip_scores();
      differentiate_pairs(row);
      release(shared.output_empty[at.slot()]);
      release(shared.query_empty[at.slot()]);
      at.next();
      return;
    }
    const Found found = find_pairs(rows, row);
    RowValues lse, delta;
    read_early(lse, shared.lse[at.slot()]);
    shared.output_full[at.slot()].wait(at.parity());
    hopper::products_begin();
    issue_scores(grads, hopper::advance(from.group, offset_of(shared.value)), grad_output);
    forget_place();
    hopper::products_wait<1>();
    hopper::pin(scores);
    weigh(scores, weights, row, found, lse);
    read_early(delta, shared.delta[at.slot()]);
    hopper::products_wait<0>();
    hopper::pin(grads);
    hopper::pin(weights);
    hopper::pin(value_sum);
    hopper::products_begin();
    issue_sum(value_sum, weights, grad_output, 1);
    forget_place();
    drop(grads, found);
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float2 of_rows = values_of(delta, shared.delta[at.slot()], i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = 4 * i + 2 * h;
        scores[j] *= fmaf(grads[j], factor, -of_rows.x);
        scores[j + 1] *= fmaf(grads[j + 1], factor, -of_rows.y);
        packed[j / 2] = pack<Element>(scores[j], scores[j + 1]);
      }
    }
    store_grad_scores(shared.grad_score[at.slot()], packed);
    if constexpr (kGeneral) {
      if (a.grad_bias != nullptr) {
        store_bias_gradient([&](int i) { return Tiles::bias_scale(a) * scores[i]; });
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if constexpr (kSplitsKeys) {
      hopper::named_sync(kGroupSync + group, 128);
    } else {
      hopper::named_sync(kTileSync, 256);
    }
    float product[32];
    hopper::leave_undefined(product);
    hopper::pin(packed);
    hopper::pin(key_sum);
    hopper::products_begin();
    issue_query(product, from);
    issue_sum(key_sum, packed, query, !kKeepsSums || sums_ != Sums::none ? 1 : 0);
    hopper::products_wait<1>();
    hopper::pin(value_sum);
    hopper::pin(weights);
    hopper::pin(product);
    release(shared.output_empty[at.slot()]);
    const float scale = Tiles::sum_scale(a);
#pragma unroll
    for (int i = 0; i < 32; ++i) query_sum[i] = scale * product[i];
    sums_ = Sums::unfinished;
    at.next();
    if constexpr (!kOverlaps) finish<0>(key_sum, query_sum);
  }

  // Adds dK and dV of this warpgroup's keys, by way of the memory that K, V, Q and dO have left.
  __device__ __forceinline__ void add(const float (&key_sum)[kSums],
                                      const float (&value_sum)[kSums]) const {
    constexpr int kBox = kBoxRows * 32;
    constexpr int kBoxes = Tiles::kDim / 32;
    static_assert(sizeof(shared.key) + sizeof(shared.value) + sizeof(shared.query) +
                      sizeof(shared.grad_output) >=
                  4 * kBoxes * kBox * sizeof(float));
    shared.key_watched.wait(0);
    hopper::named_sync(kTileSync, 256);
    float* const keys = reinterpret_cast<float*>(shared.key) + 2 * group * kBoxes * kBox;
    float* const values = keys + kBoxes * kBox;
    store_sums(keys, key_sum, Tiles::sum_scale(a));
    store_sums(values, value_sum, value_scale<Tiles>(a));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    hopper::named_sync(kGroupSync + group, 128);
    if (warp % 4 != 0 || lane != 0) return;
    const std::int32_t column = work.first_column + group * kBoxRows;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      if (a.grad_key.data != nullptr) {
        hopper::add_box(&a.key_sum, keys + i * kBox, 32 * i, column, work.kv_head, work.batch);
      }
      if (a.grad_value.data != nullptr) {
        hopper::add_box(&a.value_sum, values + i * kBox, 32 * i, column, work.kv_head, work.batch);
      }
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }

  // Stores sums of 64 keys in boxes, swizzled as TMA expects them.
  __device__ __forceinline__ void store_sums(float* to, const float (&sum)[kSums],
                                             float factor) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = warp % 4 * 16 + lane / 4 + 8 * h;
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        *reinterpret_cast<float2*>(to + i / 4 * (kBoxRows * 32) +
                                   place_in_box(key, i % 4 * 8 + lane % 4 * 2)) =
            float2{factor * sum[4 * i + 2 * h], factor * sum[4 * i + 2 * h + 1]};
      }
    }
  }

  // Computes a tile pair by pair, since its hidden pairs must not even be multiplied by 0. First,
  // each row has a warp for dQ (or for a group's part of dQ), then each key has one, so that the
  // order of additions does not vary.
  __device__ __forceinline__ void differentiate_pairs(std::int32_t first_row) const {
    constexpr int kParts = Tiles::kDim / 64;
    const std::uint32_t slot = at.slot();
    if (a.grad_query.data != nullptr) {
      constexpr int kKeys = kSplitsKeys ? 64 : Tiles::kKeys;
      const int first_key = kSplitsKeys ? group * 64 : 0;
      wait_for_buffer(at.count);
#pragma unroll 1
      for (int r = kSplitsKeys ? warp % 4 : warp; r < Tiles::kQueries; r += kSumWarps) {
        float2 sum[kParts] = {};
#pragma unroll 1
        for (int k = first_key; k < first_key + kKeys; ++k) {
          if (shared.lse[slot][r] == kInfinity) break;
          if (!is_visible(first_row + r, work.first_column + k)) continue;
          const float grad = differentiate_pair(first_row, r, k).y;
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            const float2 x = swizzled_pair<Tiles::kKeys>(shared.key, k, 64 * i + 2 * lane);
            sum[i].x = fmaf(grad, x.x, sum[i].x);
            sum[i].y = fmaf(grad, x.y, sum[i].y);
          }
        }
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const int dim = 64 * i + 2 * lane;
          const int pair = kSplitsDims ? dim / 32 : r / 64 * 2 + dim / 32;
          float* const to =
              shared.grad_query[sum_buffer(at.count)][pair] + place_in_box(r % 64, dim % 32);
          to[0] = Tiles::sum_scale(a) * sum[i].x;
          to[1] = Tiles::sum_scale(a) * sum[i].y;
        }
      }
      pass_buffer(at.count);
    }
#pragma unroll 1
    for (int k = warp; k < Tiles::kKeys; k += 8) {
      const std::int32_t column = work.first_column + k;
      float2 key_sum[kParts] = {}, value_sum[kParts] = {};
      bool any = false;
#pragma unroll 1
      for (int r = 0; r < Tiles::kQueries; ++r) {
        if (shared.lse[slot][r] == kInfinity || !is_visible(first_row + r, column)) continue;
        any = true;
        const float2 pair = differentiate_pair(first_row, r, k);
        if (kGeneral && a.grad_bias != nullptr && lane == 0) {
          const std::int64_t offset = offset_at(a, a.grad_bias_strides, work.batch,
                                                shared.step[slot].head, first_row + r, column);
          atomicAdd(a.grad_bias + offset, Tiles::bias_scale(a) * pair.y);
        }
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const float2 q = swizzled_pair<Tiles::kQueries>(shared.query[slot], r, 64 * i + 2 * lane);
          const float2 g =
              swizzled_pair<Tiles::kQueries>(shared.grad_output[slot], r, 64 * i + 2 * lane);
          key_sum[i].x = fmaf(pair.y, q.x, key_sum[i].x);
          key_sum[i].y = fmaf(pair.y, q.y, key_sum[i].y);
          value_sum[i].x = fmaf(pair.x, g.x, value_sum[i].x);
          value_sum[i].y = fmaf(pair.x, g.y, value_sum[i].y);
        }
      }
      if (!any) continue;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int dim = 64 * i + 2 * lane;
        add_at(a.grad_key, column, dim, Tiles::sum_scale(a) * key_sum[i].x,
               Tiles::sum_scale(a) * key_sum[i].y);
        const float factor = value_scale<Tiles>(a);
        add_at(a.grad_value, column, dim, factor * value_sum[i].x, factor * value_sum[i].y);
      }
    }
    asm volatile("fence.proxy.async;" ::: "memory");  // TMA adds to the gradients in add()
    hopper::named_sync(kTileSync, 256);
  }

  __device__ __forceinline__ void add_at(const Gradient& to, std::int32_t column, int dim, float x,
                                         float y) const {
    if (to.data == nullptr || dim >= to.dim) return;
    add_pair(to,
             work.batch * to.strides.batch + column * to.strides.sequence +
                 work.kv_head * to.strides.head + dim,
             x, y);
  }

  __device__ __forceinline__ void store_grad_scores(Element* to,
                                                    const std::uint32_t (&packed)[kScores / 2]) {
    // Lane l gives the address of row l % 8 of matrix l / 8: keys 0 and 8, queries 0 and 8. The
    // swizzle moves chunk c of 8 queries to chunk c ^ (key % 8).
    const std::uint32_t first =
        hopper::shared_address(to) + (16 * warp + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int query = 0; query < Tiles::kQueries; query += 16) {
      const std::uint32_t address = (first ^ query % 64 * 2) + query / 64 * (Tiles::kKeys * 128);
      const int i = query / 4;
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
          "r"(packed[i]), "r"(packed[i + 1]), "r"(packed[i + 2]), "r"(packed[i + 3])
          : "memory");
    }
  }

  // The buffer that holds dQ of step `count`, in boxes.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t sum_buffer(std::uint32_t count) const {
    return kSplitsKeys ? group : count % Tiles::kSumBuffers;
  }
  __device__ __forceinline__ void wait_for_buffer(std::uint32_t count) const {
    const std::uint32_t round = kSplitsKeys ? count : count / Tiles::kSumBuffers;
    shared.sum_empty[sum_buffer(count)].wait(round % 2 ^ 1);
    if (threadIdx.x == (kSplitsKeys ? 128 + 128 * group : 128)) {
      shared.sum_step[sum_buffer(count)] = shared.step[count % Tiles::kStages];
    }
  }
  __device__ __forceinline__ void pass_buffer(std::uint32_t count) const {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    release(shared.sum_full[sum_buffer(count)]);
  }

  // Hands over this warp's part of the 64 × 32 sums of its pair of warps.
  __device__ __forceinline__ void add_query(const float (&sum)[32], std::uint32_t count) const {
    if (a.grad_query.data == nullptr) return;
    wait_for_buffer(count);
    const std::uint32_t box = kSplitsKeys ? warp % 4 / 2 : warp / 2;
    for_box<32>(shared.grad_query[sum_buffer(count)][box], 2 * (lane % 4),
                16 * (warp % 2) + lane / 4, [&](float& entry, int i) { entry = sum[i]; });
    pass_buffer(count);
  }

  // key_sum holds nothing yet, sums that a product may still add to, or finished sums.
  enum class Sums { none, unfinished, finished };
  Sums sums_ = Sums::none;
};

}  // namespace annulus::flash::backward
