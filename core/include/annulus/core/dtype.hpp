#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace annulus {

enum class DType : std::uint8_t { boolean, uint8, int32, float16, bfloat16, float32, float64 };

[[nodiscard]] std::size_t size_of(DType dtype) noexcept;
[[nodiscard]] std::string_view name_of(DType dtype) noexcept;
/// Reads a dtype's name, or bf16, fp16, fp32 or fp64. Throws ArgumentError("dtype", …) for any
/// other text.
[[nodiscard]] DType parse_dtype(std::string_view name);
[[nodiscard]] bool is_floating(DType dtype) noexcept;
/// Unit roundoff: half the distance between 1 and the next larger value.
[[nodiscard]] double unit_roundoff(DType dtype) noexcept;

/// IEEE 754 binary16, as stored. Conversions round to nearest, ties to even.
struct Float16 {
  std::uint16_t bits = 0;
  Float16() = default;
  explicit Float16(float value) noexcept;
  explicit operator float() const noexcept;
};

/// The upper half of a binary32. Conversions round to nearest, ties to even; NaN stays NaN.
struct BFloat16 {
  std::uint16_t bits = 0;
  BFloat16() = default;
  explicit BFloat16(float value) noexcept {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const bool nan = (word & 0x7fffffffU) > 0x7f800000U;
    bits = static_cast<std::uint16_t>(nan ? (word >> 16U) | 0x40U
                                          : (word + 0x7fffU + ((word >> 16U) & 1U)) >> 16U);
  }
  explicit operator float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
  }
};

static_assert(sizeof(Float16) == 2 && sizeof(BFloat16) == 2);

/// The DType of a C++ element type.
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<bool> {
  static constexpr DType value = DType::boolean;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::uint8;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::int32;
};
template <>
struct DTypeOf<Float16> {
  static constexpr DType value = DType::float16;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::bfloat16;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::float32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::float64;
};
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

}  // namespace annulus
