#pragma once

#include "flash/epilogue.cuh"
#include "flash/general.cuh"
#include "flash/hopper/wgmma.cuh"
#include "flash/kernels.hpp"
#include "flash/shared.cuh"
#include "flash/softmax.cuh"
#include "flash/visible.cuh"

namespace annulus::flash {

/// The columns of a segment that a thread's two rows may see, counted from the thread's own first.
struct VisibleColumns {
  std::int32_t first[2];
  std::int32_t last[2];

  VisibleColumns() = default;

  __device__ __forceinline__ VisibleColumns(const Arguments& a, const Item& item,
                                            const KeySegment& segment) {
    const OwnPart own = own_part();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const ColumnSpan span = visible_columns(a, item, segment, own.row + 8 * h);
      first[h] = span.first - own.column;
      last[h] = span.last - own.column;
    }
  }
};

/// One warpgroup's part of the work: 64 rows of each query tile.
///
/// A step issues the scores of one key tile together with the weighted sum of the values of the
/// tile before. Warpgroups take turns at issuing, so that the products of one run beside the
/// softmax of another. The assembler moves the wait for the weighted sum in front of the
/// exponentials, and that is faster than behind them: conversions and factors then fill the gaps
/// between exponentials.
template <class Shape, MaskClass kMask, bool kSoftCap>
class Consumer {
  using Element = typename Shape::Element;
  using ScoreProduct = hopper::Product<Element, Shape::kColumns>;
  using ValueProduct = hopper::Product<Element, Shape::kValueDim>;
  static constexpr bool kGeneral = kMask == MaskClass::general;
  static constexpr int kScores = Shape::kColumns / 2;
  static constexpr int kOutputs = Shape::kValueDim / 2;
  static constexpr int kWeightExponent = weight_exponent<Element, kMask>();
  // A row is most accurate if its largest weight is exactly 1. If a state's LSE were the maximum,
  // all new weights would be smaller, and rows that see few keys would lose accuracy. So a state
  // enters with a sum of 2^8 and a maximum of LSE − 8 (base 2): new scores above that set the
  // maximum.
  static constexpr float kStateExponent = 8;
  static constexpr float kStateWeight = 1 << 8;
  static constexpr int kFirstTurn = 1;  // named barrier of the first warpgroup
  static constexpr int kTwoGroups = 256;
  using Tiles = RingPosition<Shape::kStages>;

 public:
  __device__ __forceinline__ Consumer(const Arguments& arguments, Shared<Shape>& memory)
      : a(arguments), shared(memory) {
    group = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128 - 1, 0);
    lane = static_cast<int>(threadIdx.x) % 32;
    scale = a.exponent_scale;
  }

  __device__ __forceinline__ void run() {
    if (group == Shape::kConsumers - 1) hopper::named_arrive(kFirstTurn, kTwoGroups);
    RingPosition<Shared<Shape>::kItems> item_at;
    for (;; item_at.next()) {
      shared.item_full[item_at.slot()].wait(item_at.parity());
      const Item& item = shared.item[item_at.slot()];
      if (item.index < 0) break;
      OnlineSoftmax softmax;
      float output[kOutputs];
      const ResultRows<Shape, kWeightExponent> result(a, item);
      result.load(output, softmax);
      bool shown[2] = {true, true};
      if (item.tile.segments > 0) attend(item, output, softmax, shown);
      shared.verdict[item_at.slot()].wait(item_at.parity());
      if (shared.left_to_repair[item_at.slot()] == 0) result.store(output, softmax, shown);
      __syncwarp();
      if (lane == 0) shared.item_empty[item_at.slot()].arrive();
    }
  }

 private:
  __device__ __forceinline__ void release(hopper::Barrier& barrier) const {
    if (lane == 0) barrier.arrive();
  }

  __device__ __forceinline__ const KeySegment& segment_of(const Item& item, int i) const {
    return i < Item::kInlineSegments ? item.segments[i] : a.segments[item.tile.first_segment + i];
  }

  // scores = Q·Kᵀ with the next tile of keys.
  __device__ __forceinline__ void issue_scores(float (&scores)[kScores]) const {
    const std::uint64_t query = hopper::operand_descriptor(shared.query[query_at.slot()][group]);
    const std::uint64_t key = hopper::operand_descriptor(shared.key[key_at.slot()]);
#pragma unroll
    for (int dim = 0; dim < Shape::kHeadDim; dim += 16) {
      // 64 columns of 128 bytes lie side by side, the next 64 behind all rows.
      const std::uint32_t inside = dim % 64 * 2;
      const std::uint64_t q = hopper::advance(query, dim / 64 * (64 * 128) + inside);
      const std::uint64_t k = hopper::advance(key, dim / 64 * (Shape::kColumns * 128) + inside);
      if (dim == 0) {
        ScoreProduct::template shared_times_shared<false>(scores, q, k);
      } else {
        ScoreProduct::template shared_times_shared<true>(scores, q, k);
      }
    }
    hopper::products_commit();
  }

  // Adds weights·V of a tile of values to `output`, or replaces `output` with it unless `add`.
  __device__ __forceinline__ void issue_values(float (&output)[kOutputs],
                                               const std::uint32_t (&weights)[kScores / 2],
                                               const Tiles& value_at, bool add) const {
    const std::uint64_t value =
        hopper::operand_descriptor(shared.value[value_at.slot()], Shape::kColumns * 128);
#pragma unroll
    for (int column = 0; column < Shape::kColumns; column += 16) {
      const int i = column / 4;
      ValueProduct::registers_times_shared(output, weights[i], weights[i + 1], weights[i + 2],
                                           weights[i + 3], hopper::advance(value, column * 128),
                                           column > 0 || add ? 1 : 0);
    }
    hopper::products_commit();
  }

  // Exponentials bound the softmax, so scores well below the cap get a tanh without exponentials.
  // Other scores are capped here. Returns true if all scores are well below the cap.
  [[nodiscard]] __device__ __forceinline__ bool cap(float (&scores)[kScores]) const {
    if constexpr (!kSoftCap) return false;
    float largest = 0;
#pragma unroll
    for (const float score : scores) largest = fmaxf(largest, fabsf(score));
    const bool small = __all_sync(0xffffffff, largest <= a.small_tanh_limit) != 0;
    if (!small) replace_by_tanh(scores, a);
    return small;
  }

  __device__ __forceinline__ void update(OnlineSoftmax& softmax, float (&scores)[kScores],
                                         bool small, std::int32_t begin, GeneralRows& general,
                                         float (&factor)[2]) const {
    if constexpr (kSoftCap) {
      if (small) {
        const SmallCappedLogits logits{a.small_tanh, a.scaled_small_tanh, scale};
        return softmax.update(scores, logits, factor);
      }
    }
    if constexpr (kGeneral) {
      float largest[2];
      find_largest(scores, largest);
      if (general.doubts(largest)) {
        general.settle(scores, begin);
        find_largest(scores, largest);
      }
      return softmax.update(scores, largest, EnlargedLogits<kWeightExponent>{scale}, factor);
    }
    softmax.update(scores, PlainLogits{scale}, factor);
  }

  __device__ __forceinline__ static void find_largest(const float (&scores)[kScores],
                                                      float (&largest)[2]) {
    largest[0] = largest[1] = -kInfinity;
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      largest[0] = max_or_nan(max_or_nan(largest[0], scores[i]), scores[i + 1]);
      largest[1] = max_or_nan(max_or_nan(largest[1], scores[i + 2]), scores[i + 3]);
    }
  }

  // Hides what this thread's rows must not see of the tile that begins at column `begin` of the
  // segment.
  __device__ __forceinline__ static void hide(float (&scores)[kScores],
                                              const VisibleColumns& visible, std::int32_t begin,
                                              const std::int32_t* ids,
                                              const std::int32_t (&row_id)[2]) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int h = i / 2 % 2;
      const std::int32_t column = i / 4 * 8 + i % 2;
      bool shown = column >= visible.first[h] - begin && column <= visible.last[h] - begin;
      if constexpr (kMask == MaskClass::ids) {
        shown = shown && __ldg(ids + begin + column) == row_id[h];
      }
      if constexpr (kGeneral) {
        shown = shown && (ids == nullptr || __ldg(ids + begin + column) == row_id[h]);
      }
      if (!shown) scores[i] = -kInfinity;
    }
  }

  // Ids of the columns of a segment, from the thread's own first on; null where ids are not
  // compared.
  __device__ __forceinline__ const std::int32_t* column_ids_of(const Item& item,
                                                               const KeySegment& segment) const {
    if (kMask == MaskClass::position || a.row_ids == nullptr) return nullptr;
    return flash::column_ids_of(a, item, segment) + own_part().column;
  }

  __device__ __forceinline__ static void narrow(const float (&scores)[kScores],
                                                std::uint32_t (&weights)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      weights[i / 2] = pack<Element>(scores[i], scores[i + 1]);
    }
  }

  __device__ __forceinline__ static void multiply(float (&output)[kOutputs],
                                                  const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output[i] *= factor[i / 2 % 2];
  }

  // Scores of the next tile, and values of the tile before.
  template <bool kMasked>
  __device__ __forceinline__ void step(float (&scores)[kScores], float (&output)[kOutputs],
                                       std::uint32_t (&weights)[kScores / 2],
                                       OnlineSoftmax& softmax, const VisibleColumns& visible,
                                       std::int32_t begin, const std::int32_t* ids,
                                       const std::int32_t (&row_id)[2], GeneralRows& general) {
    float factor[2];
    const Tiles value_at = key_at.before();
    shared.key_full[key_at.slot()].wait(key_at.parity());
    hopper::named_sync(kFirstTurn + group, kTwoGroups);
    hopper::products_begin();
    issue_scores(scores);
    shared.value_full[value_at.slot()].wait(value_at.parity());
    hopper::products_begin();
    issue_values(output, weights, value_at, has_output);
    has_output = true;
    hopper::named_arrive(kFirstTurn + (group + 1 == Shape::kConsumers ? 0 : group + 1), kTwoGroups);
    hopper::products_wait<1>();
    hopper::pin(scores);
    release(shared.key_empty[key_at.slot()]);
    key_at.next();
    const bool small = cap(scores);
    if constexpr (kGeneral) general.add(scores, begin);
    if constexpr (kMasked) hide(scores, visible, begin, ids, row_id);
    update(softmax, scores, small, begin, general, factor);
    if constexpr (kGeneral) general.drop(scores, begin);
    hopper::products_wait<0>();
    hopper::pin(output);
    release(shared.value_empty[value_at.slot()]);
    narrow(scores, weights);
    if (!Shape::kSkipsFactors || __any_sync(0xffffffff, factor[0] != 1 || factor[1] != 1)) {
      multiply(output, factor);
    }
    hopper::pin(weights);
    hopper::pin(output);
  }

  // Adds the key tiles of an item, at least one, to the state of its rows.
  __device__ __forceinline__ void attend(const Item& item, float (&output)[kOutputs],
                                         OnlineSoftmax& softmax, bool (&shown)[2]) {
    const QueryTile& tile = item.tile;
    std::int32_t row_id[2] = {0, 0};
    if (kMask == MaskClass::ids || (kGeneral && a.row_ids != nullptr)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_id[h] = row_id_of(a, item, own_part().row + 8 * h);
      }
    }

    float scores[kScores];
    std::uint32_t weights[kScores / 2];
    float factor[2];
    bool masked = (item.segments[0].flags & KeySegment::kMasked) != 0;
    std::int32_t begin = (item.segments[0].tiles - 1) * Shape::kColumns;

    // The first tile: no values to add yet.
    hopper::leave_undefined(scores);
    shared.query_full[query_at.slot()][group].wait(query_at.parity());
    shared.key_full[key_at.slot()].wait(key_at.parity());
    hopper::products_begin();
    issue_scores(scores);
    hopper::products_wait<0>();
    hopper::pin(scores);
    release(shared.key_empty[key_at.slot()]);
    key_at.next();
    const bool small = cap(scores);
    GeneralRows general(a, item, item.segments[0]);
    if constexpr (kGeneral) general.add(scores, begin);
    if (masked) {
      const KeySegment& segment = item.segments[0];
      hide(scores, VisibleColumns(a, item, segment), begin, column_ids_of(item, segment), row_id);
    }
    has_output = a.state.output != nullptr;
    if (has_output) softmax.lower(kStateExponent, scale);
    update(softmax, scores, small, begin, general, factor);
    if (has_output) {
      const float enlarge = kGeneral ? kStateWeight / a.value_scale : kStateWeight;
      const float enlarged[2] = {enlarge * factor[0], enlarge * factor[1]};
      multiply(output, enlarged);
    }
    if constexpr (kGeneral) general.drop(scores, begin);
    narrow(scores, weights);
    hopper::pin(weights);
    hopper::pin(output);

    for (std::int32_t s = 0;;) {
      if (masked && begin > 0) {
        const KeySegment& segment = segment_of(item, s);
        const VisibleColumns visible(a, item, segment);
        const std::int32_t* const ids = column_ids_of(item, segment);
        while (begin > 0) {
          begin -= Shape::kColumns;
          step<true>(scores, output, weights, softmax, visible, begin, ids, row_id, general);
        }
      } else {
        while (begin > 0) {
          begin -= Shape::kColumns;
          step<false>(scores, output, weights, softmax, {}, begin, nullptr, row_id, general);
        }
      }
      if (++s == tile.segments) break;
      begin = segment_of(item, s).tiles * Shape::kColumns;
      if constexpr (kGeneral) general.move_to(segment_of(item, s));
      masked = (segment_of(item, s).flags & KeySegment::kMasked) != 0;
    }

    if (kGeneral && (a.scores.bias.data != nullptr || a.scores.mask.data != nullptr)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) shown[h] = quad_any(general.has_shown(h));
    }
    release(shared.query_empty[query_at.slot()][group]);
    query_at.next();
    const Tiles value_at = key_at.before();
    shared.value_full[value_at.slot()].wait(value_at.parity());
    hopper::products_begin();
    issue_values(output, weights, value_at, has_output);
    hopper::products_wait<0>();
    hopper::pin(output);
    release(shared.value_empty[value_at.slot()]);
  }

  const Arguments& a;
  Shared<Shape>& shared;
  Tiles key_at;  // the next tile of keys
  RingPosition<Shape::kQueryStages> query_at;
  int group, lane;
  float scale;
  bool has_output;  // false: the next weighted sum replaces what is in `output`
};

}  // namespace annulus::flash
