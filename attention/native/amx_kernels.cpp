// Compiled for CPUs with AVX-512 and AMX. Nothing here but available() may run unless available()
// is true. No header of ours with inline functions may be included: the linker could pick the AMX
// build of such a function for the whole program.
#include "native/amx_kernels.hpp"

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace annulus::amx {
namespace {

// The memory operand of ldtilecfg.
struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// The registers are configured only while a product runs: otherwise every context switch would save
// them.
class ConfiguredTiles {
 public:
  ConfiguredTiles() {
    TileConfiguration configuration;
    for (int i = 0; i < 8; ++i) {
      configuration.row_bytes[i] = 64;
      configuration.rows[i] = kRows;
    }
    _tile_loadconfig(&configuration);
  }
  ConfiguredTiles(const ConfiguredTiles&) = delete;
  ConfiguredTiles& operator=(const ConfiguredTiles&) = delete;
  ~ConfiguredTiles() { _tile_release(); }
};

// Registers 0 to 3 are sums: rows 0-15 and 16-31 (if wide) by columns 0-15 and 16-31. 4 and 5 hold
// the rows of the left side, 6 and 7 the columns of the right.
template <bool wide>
class Block {
 public:
  Block(const Shape& shape, std::int64_t row, std::int64_t column, float* result)
      : shape_(shape),
        row_(row),
        column_(column),
        top_(result + row * shape.result_stride + column),
        bottom_(top_ + kRows * shape.result_stride) {}

  void start(bool add) const {
    if (!add) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      return;
    }
    const std::int64_t bytes = shape_.result_stride * 4;
    _tile_loadd(0, top_, bytes);
    _tile_loadd(1, top_ + kColumns, bytes);
    if constexpr (wide) {
      _tile_loadd(2, bottom_, bytes);
      _tile_loadd(3, bottom_ + kColumns, bytes);
    }
  }

  void load_left(const std::uint16_t* matrix, std::int64_t k) const {
    const std::uint16_t* const from = matrix + row_ * shape_.left_stride + k * kDepth;
    _tile_loadd(4, from, shape_.left_stride * 2);
    if constexpr (wide) _tile_loadd(5, from + kRows * shape_.left_stride, shape_.left_stride * 2);
  }

  void load_right(const std::uint16_t* matrix, std::int64_t k) const {
    const std::uint16_t* const from =
        matrix +
        (k * shape_.depth_stride + column_ / kColumns * shape_.column_stride) * kPackedTile;
    _tile_loadd(6, from, 64);
    _tile_loadd(7, from + shape_.column_stride * kPackedTile, 64);
  }

  static void multiply() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (wide) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  void store() const {
    const std::int64_t bytes = shape_.result_stride * 4;
    _tile_stored(0, top_, bytes);
    _tile_stored(1, top_ + kColumns, bytes);
    if constexpr (wide) {
      _tile_stored(2, bottom_, bytes);
      _tile_stored(3, bottom_ + kColumns, bytes);
    }
  }

 private:
  const Shape& shape_;
  std::int64_t row_;
  std::int64_t column_;
  float* top_;
  float* bottom_;
};

// If there are three parts, the kernel leaves out products of parts a and b with a + b ≥ 3, which
// are below the rounding of float32. Each product shares one operand with the product before it,
// which saves half of the loads.
template <bool wide, int parts>
void multiply_block(const Shape& shape, const Parts& left, const Parts& right, bool add,
                    std::int64_t row, std::int64_t column, float* result) {
  const Block<wide> block(shape, row, column, result);
  block.start(add);
  for (std::int64_t k = 0; k < shape.depth / kDepth; ++k) {
    block.load_left(left.of[parts - 1], k);
    block.load_right(right.of[0], k);
    block.multiply();
    if constexpr (parts == 2) {
      block.load_left(left.of[0], k);
      block.multiply();
      block.load_right(right.of[1], k);
      block.multiply();
      block.load_left(left.of[1], k);
      block.multiply();
    }
    if constexpr (parts == 3) {
      block.load_left(left.of[1], k);
      block.multiply();
      block.load_right(right.of[1], k);
      block.multiply();
      block.load_left(left.of[0], k);
      block.multiply();
      block.load_right(right.of[0], k);
      block.multiply();
      block.load_right(right.of[2], k);
      block.multiply();
    }
  }
  block.store();
}

template <int parts>
void multiply_parts(const Shape& shape, const Parts& left, const Parts& right, bool add,
                    float* result) {
  const ConfiguredTiles tiles;
  for (std::int64_t column = 0; column < shape.columns; column += 2 * kColumns) {
    std::int64_t row = 0;
    for (; row + 2 * kRows <= shape.rows; row += 2 * kRows) {
      multiply_block<true, parts>(shape, left, right, add, row, column, result);
    }
    if (row < shape.rows) {
      multiply_block<false, parts>(shape, left, right, add, row, column, result);
    }
  }
}

// Splits 16 values and stores the parts of the values in `stored`. Values not in `good` become 0.
template <int parts>
void store_parts(__m512 value, __mmask16 good, __mmask16 stored, const Parts& to, std::int64_t i) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  __m512 rest = _mm512_maskz_mov_ps(good, value);
  for (int part = 0; part < parts; ++part) {
    const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(rest), half);
    rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(_mm512_and_si512(rounded, upper)));
    _mm256_mask_storeu_epi16(to.of[part] + i, stored,
                             _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
}

// Indices of the upper 16 bits of each lane of two vectors.
alignas(64) constexpr std::uint16_t kOddHalves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                      23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                      45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

__mmask16 first_lanes(std::int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffffU : (1U << static_cast<unsigned>(count)) - 1U);
}

}  // namespace

bool available() {
  static const bool answer = [] {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return false;
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    constexpr unsigned kBFloat16 = 1U << 22U;
    constexpr unsigned kTile = 1U << 24U;
    if ((d & kBFloat16) == 0 || (d & kTile) == 0) return false;
    // Tile registers enlarge the state of a thread, so Linux requires a process to ask for them.
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return answer;
}

void pack_transposed(const std::uint16_t* rows, std::int64_t stride, std::int64_t depth,
                     std::uint16_t* tiles) {
  // Transposes 16 × 16 pairs in four steps, which exchange lanes 1, 2, 4 and 8 apart.
  for (std::int64_t k = 0; k < depth; k += kDepth, tiles += kPackedTile) {
    __m512i a[16];
    __m512i b[16];
    for (int i = 0; i < 16; ++i) {
      a[i] = _mm512_loadu_si512(rows + i * stride + k);
      // The next rows are often too far away for the hardware prefetcher.
      _mm_prefetch(rows + (i + 16) * stride + k, _MM_HINT_T0);
    }
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
      a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // Now lane l of a[4 g + m] holds pair 4 l + m of rows 4 g to 4 g + 3.
    for (int m = 0; m < 4; ++m) {
      b[m] = _mm512_shuffle_i32x4(a[m], a[4 + m], 0x88);
      b[4 + m] = _mm512_shuffle_i32x4(a[m], a[4 + m], 0xdd);
      b[8 + m] = _mm512_shuffle_i32x4(a[8 + m], a[12 + m], 0x88);
      b[12 + m] = _mm512_shuffle_i32x4(a[8 + m], a[12 + m], 0xdd);
    }
    for (int m = 0; m < 4; ++m) {
      const auto store = [tiles](int pair, __m512i row) {
        _mm512_store_si512(tiles + pair * kDepth, row);
      };
      store(m, _mm512_shuffle_i32x4(b[m], b[8 + m], 0x88));
      store(8 + m, _mm512_shuffle_i32x4(b[m], b[8 + m], 0xdd));
      store(4 + m, _mm512_shuffle_i32x4(b[4 + m], b[12 + m], 0x88));
      store(12 + m, _mm512_shuffle_i32x4(b[4 + m], b[12 + m], 0xdd));
    }
  }
}

bool pack(const std::uint16_t* rows, std::int64_t stride, std::int64_t columns,
          std::uint16_t* tiles) {
  alignas(64) std::uint16_t order[2][32];
  for (int i = 0; i < 32; ++i) {
    order[0][i] = static_cast<std::uint16_t>(i / 2 + i % 2 * 32);
    order[1][i] = static_cast<std::uint16_t>(order[0][i] + 16);
  }
  const __m512i lower = _mm512_load_si512(order[0]);
  const __m512i upper = _mm512_load_si512(order[1]);
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i largest = _mm512_setzero_si512();
  for (std::int64_t row = 0; row < kDepth; row += 2) {
    std::uint16_t* to = tiles + row * kColumns;
    for (std::int64_t n = 0; n < columns; n += 2 * kColumns, to += 2 * kPackedTile) {
      const __m512i even = _mm512_loadu_si512(rows + row * stride + n);
      const __m512i odd = _mm512_loadu_si512(rows + (row + 1) * stride + n);
      _mm_prefetch(rows + (row + kDepth) * stride + n, _MM_HINT_T0);
      _mm_prefetch(rows + (row + kDepth + 1) * stride + n, _MM_HINT_T0);
      largest = _mm512_max_epu16(largest, _mm512_and_si512(even, magnitude));
      largest = _mm512_max_epu16(largest, _mm512_and_si512(odd, magnitude));
      _mm512_store_si512(to, _mm512_permutex2var_epi16(even, lower, odd));
      _mm512_store_si512(to + kPackedTile, _mm512_permutex2var_epi16(even, upper, odd));
    }
  }
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0;
}

namespace {

template <int parts>
bool split_values(const float* values, std::int64_t count, const Parts& to) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i one = _mm512_set1_epi32(1);
  // Compared after subtracting 1, which turns 0 into the largest number: 0 is not too small.
  const __m512i smallest = _mm512_set1_epi32(((127 - 100) << 23) - 1);
  const __m512i infinite = _mm512_set1_epi32(0x7f7f8000);  // from here on, rounds to infinity
  const auto size_of = [&](__m512 value) {
    return _mm512_and_si512(_mm512_castps_si512(value), magnitude);
  };
  std::int64_t i = 0;
  // Two vectors at a time, until one has a value that cannot be split.
  const __m512i odd = _mm512_load_si512(kOddHalves);
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  for (; i + 32 <= count; i += 32) {
    __m512 rest[2] = {_mm512_loadu_ps(values + i), _mm512_loadu_ps(values + i + 16)};
    const __m512i size[2] = {size_of(rest[0]), size_of(rest[1])};
    const __m512i least =
        _mm512_min_epu32(_mm512_sub_epi32(size[0], one), _mm512_sub_epi32(size[1], one));
    const __mmask16 lost = _mm512_cmplt_epu32_mask(least, smallest) |
                           _mm512_cmpge_epu32_mask(_mm512_max_epu32(size[0], size[1]), infinite);
    if (lost != 0) break;
    for (int part = 0; part < parts; ++part) {
      __m512i rounded[2];
      for (int v = 0; v < 2; ++v) {
        rounded[v] = _mm512_add_epi32(_mm512_castps_si512(rest[v]), half);
        rest[v] = _mm512_sub_ps(rest[v], _mm512_castsi512_ps(_mm512_and_si512(rounded[v], upper)));
      }
      _mm512_storeu_si512(to.of[part] + i, _mm512_permutex2var_epi16(rounded[0], odd, rounded[1]));
    }
  }
  __mmask16 bad = 0;
  for (; i < count; i += 16) {
    const __mmask16 stored = first_lanes(count - i);
    const __m512 value = _mm512_maskz_loadu_ps(stored, values + i);
    const __m512i size = size_of(value);
    const auto lost =
        static_cast<__mmask16>(_mm512_cmplt_epu32_mask(_mm512_sub_epi32(size, one), smallest) |
                               _mm512_cmpge_epu32_mask(size, infinite));
    bad |= lost;
    store_parts<parts>(value, static_cast<__mmask16>(~lost), stored, to, i);
  }
  return bad == 0;
}

}  // namespace

bool split(const float* values, std::int64_t count, const Parts& parts) {
  if (parts.of[2] != nullptr) return split_values<3>(values, count, parts);
  if (parts.of[1] != nullptr) return split_values<2>(values, count, parts);
  return split_values<1>(values, count, parts);
}

bool split_float16(const std::uint16_t* values, std::int64_t count, const Parts& parts) {
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  __mmask16 bad = 0;
  for (std::int64_t i = 0; i < count; i += 16) {
    const __mmask16 stored = first_lanes(count - i);
    const __m512 value = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(stored, values + i));
    const __mmask16 lost =
        _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(value), exponent), exponent);
    bad |= lost;
    store_parts<2>(value, static_cast<__mmask16>(~lost), stored, parts, i);
  }
  return bad == 0;
}

void multiply(const Shape& shape, const Parts& left, const Parts& right, bool add, float* result) {
  if (left.of[2] != nullptr) {
    multiply_parts<3>(shape, left, right, add, result);
  } else if (left.of[1] != nullptr) {
    multiply_parts<2>(shape, left, right, add, result);
  } else {
    multiply_parts<1>(shape, left, right, add, result);
  }
}

void transpose(const std::uint16_t* rows, std::int64_t count, std::int64_t columns,
               std::uint16_t* to, std::int64_t to_stride) {
  alignas(64) std::uint16_t pairs[2 * kPackedTile];
  alignas(64) std::uint16_t tile[kPackedTile];
  for (std::int64_t row = 0; row < count; row += kDepth) {
    for (std::int64_t column = 0; column < columns; column += 2 * kColumns) {
      // Row p of a packed tile holds entries 2p and 2p + 1 of each of its columns, and transposing
      // the pairs puts the pairs of a column side by side.
      (void)pack(rows + row * columns + column, columns, 2 * kColumns, pairs);
      for (std::int64_t half = 0; half < 2; ++half) {
        pack_transposed(pairs + half * kPackedTile, kDepth, kDepth, tile);
        for (std::int64_t i = 0; i < kColumns; ++i) {
          _mm512_storeu_si512(to + (column + half * kColumns + i) * to_stride + row,
                              _mm512_load_si512(tile + i * kDepth));
        }
      }
    }
  }
}

void scale(float* values, std::int64_t count, float factor) {
  const __m512 factors = _mm512_set1_ps(factor);
  for (std::int64_t i = 0; i < count; i += 16) {
    _mm512_storeu_ps(values + i, _mm512_mul_ps(_mm512_loadu_ps(values + i), factors));
  }
}

void add_to(float* sums, const float* values, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += 16) {
    _mm512_storeu_ps(sums + i,
                     _mm512_add_ps(_mm512_loadu_ps(sums + i), _mm512_loadu_ps(values + i)));
  }
}

}  // namespace annulus::amx
