// Compiled for a CPU with AVX-512 and AMX: nothing here may run before available() was asked, and
// no header with inline functions of ours may be included, lest their code be taken by everyone.
#include "native/amx_kernels.hpp"

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace annulus::amx {
namespace {

// Layout of the memory operand of ldtilecfg.
struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// The registers are configured only while a product runs, so that a thread in between saves none.
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

// Sums 0 to 3 are of rows 0-15 and 16-31 by columns 0-15 and 16-31. Wide: both halves of the rows.
template <bool wide>
void multiply_block(const Shape& shape, const Factors* factors, int count, bool add,
                    std::int64_t row, std::int64_t column, float* result) {
  const std::int64_t left_bytes = shape.left_stride * 2;
  const std::int64_t result_bytes = shape.result_stride * 4;
  float* const top = result + row * shape.result_stride + column;
  float* const bottom = top + kRows * shape.result_stride;
  if (add) {
    _tile_loadd(0, top, result_bytes);
    _tile_loadd(1, top + kColumns, result_bytes);
    if constexpr (wide) {
      _tile_loadd(2, bottom, result_bytes);
      _tile_loadd(3, bottom + kColumns, result_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (wide) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int i = 0; i < count; ++i) {
    const std::uint16_t* left = factors[i].left + row * shape.left_stride;
    const std::uint16_t* right =
        factors[i].right + column / kColumns * shape.column_stride * kPackedTile;
    for (std::int64_t k = 0; k < shape.depth; k += kDepth) {
      _tile_loadd(4, left, left_bytes);
      _tile_loadd(6, right, 64);
      _tile_loadd(7, right + shape.column_stride * kPackedTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (wide) {
        _tile_loadd(5, left + kRows * shape.left_stride, left_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      left += kDepth;
      right += shape.depth_stride * kPackedTile;
    }
  }
  _tile_stored(0, top, result_bytes);
  _tile_stored(1, top + kColumns, result_bytes);
  if constexpr (wide) {
    _tile_stored(2, bottom, result_bytes);
    _tile_stored(3, bottom + kColumns, result_bytes);
  }
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
    // Tile data make a thread's state larger, so that Linux wants to be asked for them.
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return answer;
}

void pack_transposed(const std::uint16_t* rows, std::int64_t stride, std::int64_t depth,
                     std::uint16_t* tiles) {
  // A transposition of 16 × 16 pairs: by 1, 2, 4 and 8.
  for (std::int64_t k = 0; k < depth; k += kDepth, tiles += kPackedTile) {
    __m512i a[16];
    __m512i b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows + i * stride + k);
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
      largest = _mm512_max_epu16(largest, _mm512_and_si512(even, magnitude));
      largest = _mm512_max_epu16(largest, _mm512_and_si512(odd, magnitude));
      _mm512_store_si512(to, _mm512_permutex2var_epi16(even, lower, odd));
      _mm512_store_si512(to + kPackedTile, _mm512_permutex2var_epi16(even, upper, odd));
    }
  }
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0;
}

bool split_float16(const std::uint16_t* values, std::int64_t count, std::uint16_t* high,
                   std::uint16_t* low) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  __mmask16 lost = 0;
  for (std::int64_t i = 0; i < count; i += 16) {
    const std::int64_t left = count - i;
    const auto mask = static_cast<__mmask16>(left >= 16 ? 0xffffU : (1U << left) - 1U);
    const __m512 value = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, values + i));
    const __m512i bits = _mm512_castps_si512(value);
    const __mmask16 finite = _mm512_cmpneq_epi32_mask(_mm512_and_si512(bits, exponent), exponent);
    lost |= static_cast<__mmask16>(~finite);
    const __m512i rounded = _mm512_mask_add_epi32(bits, finite, bits, half);
    const __m512 kept = _mm512_castsi512_ps(_mm512_and_si512(rounded, upper));
    const __m512i rest = _mm512_castps_si512(_mm512_maskz_sub_ps(finite, value, kept));
    _mm256_mask_storeu_epi16(high + i, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    _mm256_mask_storeu_epi16(low + i, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rest, 16)));
  }
  return lost == 0;
}

void multiply(const Shape& shape, const Factors* factors, int count, bool add, float* result) {
  const ConfiguredTiles tiles;
  for (std::int64_t column = 0; column < shape.columns; column += 2 * kColumns) {
    std::int64_t row = 0;
    for (; row + 2 * kRows <= shape.rows; row += 2 * kRows) {
      multiply_block<true>(shape, factors, count, add, row, column, result);
    }
    if (row < shape.rows) {
      multiply_block<false>(shape, factors, count, add, row, column, result);
    }
  }
}

}  // namespace annulus::amx
