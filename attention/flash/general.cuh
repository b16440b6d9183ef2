#pragma once

#include <type_traits>

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

  /// Counts only in a row without weights so far (see settle()). False: dense mask and bias hide
  /// all of the thread's columns. True: they may have left some.
  [[nodiscard]] __device__ __forceinline__ bool has_shown(int h) const { return shown[h] != 0; }

  /// Turns a tile of scores, which begins at column `begin` of the segment, into what the softmax
  /// takes: with soft cap, bias and dense mask. Pairs that dense mask or bias hide become −∞, and
  /// so do columns past the end of the segment. A bias needs settle() if doubts() says so.
  template <int kScores>
  __device__ __forceinline__ void add(float (&scores)[kScores], std::int32_t begin) {
    if (a.soft_cap != 0) replace_by_tanh(scores, a);
    const auto& bias = a.scores.bias;
    const auto& mask = a.scores.mask;
    if (bias.data != nullptr) {
      constexpr float kUnit = kLog2E / kBiasedExponentScale;
      read<kScores>(bias, -kInfinity, begin, [&](int i, int, float first, float second) {
        scores[i] = fmaf(scores[i], a.scale_beside_bias, first * kUnit);
        scores[i + 1] = fmaf(scores[i + 1], a.scale_beside_bias, second * kUnit);
      });
    }
    if (mask.data != nullptr) {
      read<kScores>(mask, std::uint8_t{0}, begin,
                    [&](int i, int h, std::uint32_t first, std::uint32_t second) {
                      shown[h] |= first | second;
                      if (first == 0) scores[i] = -kInfinity;
                      if (second == 0) scores[i + 1] = -kInfinity;
                    });
    }
  }

  /// True if the warp's tile needs settle(), given the largest values of the two rows, or NaN.
  [[nodiscard]] __device__ __forceinline__ bool doubts(const float (&largest)[2]) const {
    if (a.scores.bias.data == nullptr) return false;
    const auto doubtful = [&](int h) {
      return !(largest[h] >= a.no_maximum) && !(largest[h] == -kInfinity && shown[h] != 0);
    };
    return __any_sync(0xffffffff, doubtful(0) || doubtful(1)) != 0;
  }

  /// Mends what adding a bias leaves wrong, which is rare. A bias of −∞ hides products that are not
  /// finite too, although their sum is NaN. Where the biases of a row are so small that they would
  /// overflow as exponents, they count as the least that does not: the row still has weights.
  template <int kScores>
  __device__ __forceinline__ void settle(float (&scores)[kScores], std::int32_t begin) {
    read<kScores>(a.scores.bias, -kInfinity, begin, [&](int i, int h, float first, float second) {
      settle_one(scores[i], first, h);
      settle_one(scores[i + 1], second, h);
    });
  }

  /// Drops weights of the same tile. The others are not rescaled here: see Arguments::value_scale.
  template <int kScores>
  __device__ __forceinline__ void drop(float (&weights)[kScores], std::int32_t begin) const {
    if (a.dropout.threshold == 0) return;
    const OwnPart own = own_part();
    const std::int64_t position =
        segment->start + std::int64_t{segment->stride} * (begin + own.column);
    std::uint32_t dropped[2];
    const bool odd = (segment->start + begin) % 2 != 0;  // the threads' own columns are even
    if (segment->stride == 1 && !odd) {
      // Code of its own for a key among the arguments, which costs no registers: with one code for
      // both, all dropout is 18 % slower.
      const auto first = static_cast<std::uint32_t>(position);
      if (a.dropout.called_key == nullptr) {
        draw_words<kScores / 4>(own, first, {a.dropout.key[0], a.dropout.key[1]}, dropped);
      } else {
        draw_words<kScores / 4>(own, first, cuda::key_of(a.dropout), dropped);
      }
    } else if (segment->stride == 1) {
      draw_odd_words<kScores / 4>(own, static_cast<std::uint32_t>(position), dropped);
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
  __device__ __forceinline__ void settle_one(float& score, float bias, int h) {
    const bool hides = bias == -kInfinity;
    shown[h] |= hides ? 0U : 1U;
    if (hides) {
      score = -kInfinity;
    } else if (score < a.no_maximum && score != -kInfinity) {
      score = a.no_maximum;
    }
  }

  // The keys of a bias or mask at columns of the segment, from one of them on.
  struct Keys {
    std::int64_t first;
    std::int32_t step;
  };
  [[nodiscard]] __device__ __forceinline__ Keys keys_from(std::int32_t column) const {
    if (a.scores.by_column) return {segment->first_column + column, 1};
    return {segment->start + std::int64_t{segment->stride} * column, segment->stride};
  }

  // A row of a bias or mask, beginning at the thread's first column.
  template <class T>
  struct Cursor {
    const T* first;
    std::int64_t step;

    __device__ __forceinline__ Cursor(const cuda::ScoreArgument<T>& tensor, const Item& item,
                                      std::int32_t row, const Keys& keys)
        : first(tensor.row(item.batch, item.head, row) + keys.first * tensor.strides[3]),
          step(tensor.strides[3] * keys.step) {}
    [[nodiscard]] __device__ __forceinline__ bool in_pairs() const {
      return step == 1 && reinterpret_cast<std::uintptr_t>(first) % (2 * sizeof(T)) == 0;
    }
  };

  // Calls use(i, h, entry of element i, entry of element i + 1) for each pair of elements of a
  // tile. Columns past the end of the segment have the entry `hides`.
  template <int kScores, class T, class Use>
  __device__ __forceinline__ void read(const cuda::ScoreArgument<T>& tensor, T hides,
                                       std::int32_t begin, const Use& use) const {
    using Pair = std::conditional_t<std::is_same_v<T, float>, float2, uchar2>;
    const OwnPart own = own_part();
    const std::int32_t column = begin + own.column;
    const Keys keys = keys_from(column);
    const std::int32_t behind = segment->columns - column;  // columns left in the segment
    constexpr int kLast = 2 * kScores - 7;                  // the thread's last column
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Cursor<T> at(tensor, item, row_of(own, h), keys);
      if (at.in_pairs() && behind > kLast) {
#pragma unroll
        for (int n = 0; n < kScores / 4; ++n) {
          const Pair pair = __ldg(reinterpret_cast<const Pair*>(at.first + 8 * n));
          use(4 * n + 2 * h, h, pair.x, pair.y);
        }
        continue;
      }
#pragma unroll
      for (int n = 0; n < kScores / 4; ++n) {
        const auto entry = [&](int c) {
          return c < behind ? __ldg(at.first + c * at.step) : hides;
        };
        use(4 * n + 2 * h, h, entry(8 * n), entry(8 * n + 1));
      }
    }
  }

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
  __device__ __forceinline__ void draw_words(const OwnPart& own, std::uint32_t position, uint2 key,
                                             std::uint32_t (&dropped)[2]) const {
    const std::uint32_t pair = position % 8 / 2;
    const std::uint32_t before = position % 32 / 8;  // pairs of the first call before `position`
    std::uint64_t bits[2] = {0, 0};
    const std::uint32_t calls = (before + kPairs + 3) / 4;
    for (std::uint32_t call = 0; call < calls; ++call) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::uint32_t eight = draw_eight(own, (position / 32 + call) * 4 + pair, h, key);
        bits[h] |= std::uint64_t{eight} << (8 * call);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) dropped[h] = static_cast<std::uint32_t>(bits[h] >> (2 * before));
  }
  // Eight columns of row h: bits 2n and 2n + 1 say whether the entries of word n drop.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t draw_eight(const OwnPart& own,
                                                                    std::uint32_t column_word,
                                                                    int h, uint2 key) const {
    const uint4 words =
        cuda::philox({column_word, position_of(own, h),
                      a.dropout.first_head + static_cast<std::uint32_t>(item.head),
                      a.dropout.first_batch + static_cast<std::uint32_t>(item.batch)},
                     key.x, key.y);
    return two(words.x) | two(words.y) << 2 | two(words.z) << 4 | two(words.w) << 6;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t two(std::uint32_t word) const {
    return ((word & 0xffffU) < a.dropout.threshold ? 1U : 0U) |
           (word >> 16U < a.dropout.threshold ? 2U : 0U);
  }

  // The same for an odd `position`. The calls' pairs begin at even positions, so the second half of
  // each column pair is in a pair that the next of the row's four threads draws, and of the fourth
  // thread in the first one's next.
  template <int kPairs>
  __device__ __forceinline__ void draw_odd_words(const OwnPart& own, std::uint32_t position,
                                                 std::uint32_t (&dropped)[2]) const {
    const std::uint32_t pair = position % 8 / 2;
    const std::uint32_t before = position % 32 / 8;
    const std::uint32_t calls = (before + kPairs + 4) / 4;
    const int thread = static_cast<int>(threadIdx.x) % 4;
    const uint2 key = cuda::key_of(a.dropout);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      std::uint64_t bits = 0;
#pragma unroll 1
      for (std::uint32_t call = 0; call < calls; ++call) {
        const std::uint32_t eight = draw_eight(own, (position / 32 + call) * 4 + pair, h, key);
        bits |= std::uint64_t{eight} << (8 * call);
      }
      bits >>= 2 * before;
      const auto asked = static_cast<std::uint32_t>(thread == 0 ? bits >> 2 : bits);
      const std::uint32_t next = __shfl_sync(0xffffffff, asked, (thread + 1) % 4, 4);
      dropped[h] =
          (static_cast<std::uint32_t>(bits >> 1) & 0x55555555U) | (next << 1 & 0xaaaaaaaaU);
    }
  }

  // The same for positions with a stride.
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
  std::uint32_t shown[2] = {0, 0};  // not 0: has_shown()
};

}  // namespace annulus::flash
