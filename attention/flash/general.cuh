#pragma once

#include "cuda/dropout.cuh"
#include "flash/epilogue.cuh"
#include "flash/softmax.cuh"

namespace annulus::flash {

/// Bias, dense mask and dropout for a thread's two rows of scores in a segment. Element 4n + 2h + e
/// of a tile of scores is in row h, and in column 8n + e counted from the thread's first.
class GeneralRows {
 public:
  __device__ __forceinline__ GeneralRows(const Arguments& arguments, const Item& work,
                                         const KeySegment& of)
      : a(arguments), item(work), segment(&of) {}

  __device__ __forceinline__ void move_to(const KeySegment& of) { segment = &of; }

  /// Whether dense mask and bias have left row h any of the thread's columns so far.
  [[nodiscard]] __device__ __forceinline__ bool has_shown(int h) const { return shown[h]; }

  /// Turns a tile of scores, which begins at column `begin` of the segment, into final logits in
  /// units of log 2. Pairs that dense mask or bias hide become −∞, and so do columns past the end
  /// of the segment.
  template <int kScores>
  __device__ __forceinline__ void add(float (&scores)[kScores], std::int32_t begin) {
    if (a.soft_cap != 0) {
#pragma unroll
      for (float& score : scores) score = tanh_any(score * a.scale) * (a.soft_cap * kLog2E);
    } else {
#pragma unroll
      for (float& score : scores) score *= a.scale * kLog2E;
    }
    const OwnPart own = own_part();
    const std::int32_t column = begin + own.column;
    const std::int64_t position = segment->start + std::int64_t{segment->stride} * column;
    const std::int32_t behind = segment->columns - column;  // columns left in the segment
    constexpr int kLast = 2 * kScores - 7;                  // the thread's last column
    const auto& [bias, mask] = a.scores;
    if (bias.data != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Cursor<float> at(bias, item, row_of(own, h), position, segment->stride);
        if (at.in_pairs() && behind > kLast) {
#pragma unroll
          for (int n = 0; n < kScores / 4; ++n) {
            const float2 pair = __ldg(reinterpret_cast<const float2*>(at.first + 8 * n));
            add_bias(scores[4 * n + 2 * h], pair.x, h);
            add_bias(scores[4 * n + 2 * h + 1], pair.y, h);
          }
          continue;
        }
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
          const int c = i / 2 * 8 + i % 2;
          add_bias(scores[i / 2 * 4 + 2 * h + i % 2],
                   c < behind ? __ldg(at.first + c * at.step) : -kInfinity, h);
        }
      }
    }
    if (mask.data != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Cursor<std::uint8_t> at(mask, item, row_of(own, h), position, segment->stride);
        if (at.in_pairs() && behind > kLast) {
#pragma unroll
          for (int n = 0; n < kScores / 4; ++n) {
            const uchar2 pair = __ldg(reinterpret_cast<const uchar2*>(at.first + 8 * n));
            test_mask(scores[4 * n + 2 * h], pair.x, h);
            test_mask(scores[4 * n + 2 * h + 1], pair.y, h);
          }
          continue;
        }
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
          const int c = i / 2 * 8 + i % 2;
          test_mask(scores[i / 2 * 4 + 2 * h + i % 2],
                    c < behind ? __ldg(at.first + c * at.step) : std::uint8_t{0}, h);
        }
      }
    }
  }

  /// Drops weights of the same tile. The others are not rescaled here: see Arguments::value_scale.
  template <int kScores>
  __device__ __forceinline__ void drop(float (&weights)[kScores], std::int32_t begin) const {
    if (a.dropout.threshold == 0) return;
    const OwnPart own = own_part();
    const std::int64_t position =
        segment->start + std::int64_t{segment->stride} * (begin + own.column);
    std::uint32_t dropped[2];
    if (segment->stride == 1 && position % 2 == 0) {
      draw_words<kScores / 4>(own, static_cast<std::uint32_t>(position), dropped);
    } else {
      draw_each<kScores / 4>(own, position, dropped);
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const bool drops = (dropped[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1U) != 0;
      if (drops) weights[i] = 0.0f;
    }
  }

 private:
  // Biases are bounded below, so that their product with log2 e stays finite: a row whose biases
  // are all that small still has weights. Only −∞ itself hides.
  __device__ __forceinline__ void add_bias(float& score, float bias, int h) {
    const bool hides = bias == -kInfinity;
    shown[h] = shown[h] || !hides;
    const float scaled = bias < kLeastBias ? kLeastBias * kLog2E : bias * kLog2E;
    score = hides ? -kInfinity : score + scaled;
  }
  __device__ __forceinline__ void test_mask(float& score, std::uint8_t visible, int h) {
    shown[h] = shown[h] || visible != 0;
    if (visible == 0) score = -kInfinity;
  }

  // A row of a bias or mask, beginning at the thread's first column.
  template <class T>
  struct Cursor {
    const T* first;
    std::int64_t step;

    __device__ __forceinline__ Cursor(const cuda::ScoreArgument<T>& tensor, const Item& item,
                                      std::int32_t row, std::int64_t position, std::int32_t stride)
        : first(tensor.row(item.batch, item.head, row) + position * tensor.strides[3]),
          step(tensor.strides[3] * stride) {}
    [[nodiscard]] __device__ __forceinline__ bool in_pairs() const {
      return step == 1 && reinterpret_cast<std::uintptr_t>(first) % (2 * sizeof(T)) == 0;
    }
  };

  // Rows past the end of the tile read what its last row reads.
  [[nodiscard]] __device__ __forceinline__ std::int32_t row_of(const OwnPart& own, int h) const {
    return item.tile.first_row + min(own.row + 8 * h, item.tile.rows - 1);
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t position_of(const OwnPart& own,
                                                                     int h) const {
    return static_cast<std::uint32_t>(item.tile.start + item.tile.row_stride * (own.row + 8 * h));
  }

  // Bit 2n + e says whether column 8n + e, counted from the even `position`, drops. One call of
  // Philox decides eight of a thread's columns: the pairs of four such n (see Dropout).
  template <int kPairs>
  __device__ __forceinline__ void draw_words(const OwnPart& own, std::uint32_t position,
                                             std::uint32_t (&dropped)[2]) const {
    const std::uint32_t pair = position % 8 / 2;
    const std::uint32_t before = position % 32 / 8;  // pairs of the first call before `position`
    std::uint64_t bits[2] = {0, 0};
    const std::uint32_t calls = (before + kPairs + 3) / 4;
    for (std::uint32_t call = 0; call < calls; ++call) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 words =
            cuda::philox({(position / 32 + call) * 4 + pair, position_of(own, h),
                          a.dropout.first_head + static_cast<std::uint32_t>(item.head),
                          a.dropout.first_batch + static_cast<std::uint32_t>(item.batch)},
                         a.dropout.key[0], a.dropout.key[1]);
        std::uint32_t eight = 0;
        eight |= two(words.x) | two(words.y) << 2 | two(words.z) << 4 | two(words.w) << 6;
        bits[h] |= std::uint64_t{eight} << (8 * call);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) dropped[h] = static_cast<std::uint32_t>(bits[h] >> (2 * before));
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t two(std::uint32_t word) const {
    return ((word & 0xffffU) < a.dropout.threshold ? 1U : 0U) |
           (word >> 16U < a.dropout.threshold ? 2U : 0U);
  }

  // The same for positions with a stride, or with an odd first one.
  template <int kPairs>
  __device__ __forceinline__ void draw_each(const OwnPart& own, std::int64_t position,
                                            std::uint32_t (&dropped)[2]) const {
    dropped[0] = dropped[1] = 0;
#pragma unroll 1
    for (int i = 0; i < 2 * kPairs; ++i) {
      const std::int64_t j = position + std::int64_t{segment->stride} * (i / 2 * 8 + i % 2);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool drops =
            cuda::drops(a.dropout, static_cast<std::uint32_t>(item.batch),
                        static_cast<std::uint32_t>(item.head), position_of(own, h), j);
        dropped[h] |= drops ? 1U << i : 0U;
      }
    }
  }

  const Arguments& a;
  const Item& item;
  const KeySegment* segment;
  bool shown[2] = {false, false};
};

}  // namespace annulus::flash
