#include <array>
#include <cmath>
#include <string>

#include <annulus/core/dtype.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  std::size_t size;
  bool floating;
  int precision;  // bits of the significand, the hidden one included
};

constexpr std::array kInfos{
    DTypeInfo{DType::boolean, "bool", 1, false, 0},
    DTypeInfo{DType::uint8, "uint8", 1, false, 0},
    DTypeInfo{DType::int32, "int32", 4, false, 0},
    DTypeInfo{DType::float16, "float16", 2, true, 11},
    DTypeInfo{DType::bfloat16, "bfloat16", 2, true, 8},
    DTypeInfo{DType::float32, "float32", 4, true, 24},
    DTypeInfo{DType::float64, "float64", 8, true, 53},
};

const DTypeInfo& info_of(DType dtype) noexcept {
  return kInfos[static_cast<std::size_t>(dtype)];
}

}  // namespace

std::size_t size_of(DType dtype) noexcept {
  return info_of(dtype).size;
}
std::string_view name_of(DType dtype) noexcept {
  return info_of(dtype).name;
}
bool is_floating(DType dtype) noexcept {
  return info_of(dtype).floating;
}
double unit_roundoff(DType dtype) noexcept {
  return std::ldexp(1.0, -info_of(dtype).precision);
}

DType parse_dtype(std::string_view name) {
  constexpr std::array kShort{std::pair(std::string_view("bf16"), DType::bfloat16),
                              std::pair(std::string_view("fp16"), DType::float16),
                              std::pair(std::string_view("fp32"), DType::float32),
                              std::pair(std::string_view("fp64"), DType::float64)};
  for (const auto& info : kInfos) {
    if (info.name == name) return info.dtype;
  }
  for (const auto& [alias, dtype] : kShort) {
    if (alias == name) return dtype;
  }
  std::string known;
  for (const auto& info : kInfos) {
    if (!known.empty()) known += ", ";
    known += info.name;
  }
  throw ArgumentError("dtype", "'" + std::string(name) + "'", "one of " + known);
}

Float16::Float16(float value) noexcept {
  const auto word = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((word >> 16U) & 0x8000U);
  const std::uint32_t magnitude = word & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    bits = static_cast<std::uint16_t>(sign | 0x7e00U);
  } else if (magnitude >= 0x477ff000U) {
    // 65520 and above round to infinity.
    bits = static_cast<std::uint16_t>(sign | 0x7c00U);
  } else if (magnitude < 0x38800000U) {
    // Subnormal: adding 0.5 aligns the significand so that the FPU does the rounding.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    bits = static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U));
  } else {
    const std::uint32_t rounded = magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13U) & 1U);
    bits = static_cast<std::uint16_t>(sign | (rounded >> 13U));
  }
}

Float16::operator float() const noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16U;
  const std::uint32_t magnitude = bits & 0x7fffU;
  if (magnitude >= 0x7c00U) {
    return std::bit_cast<float>(sign | 0x7f800000U | ((magnitude & 0x3ffU) << 13U));
  }
  // Scaling by 2^112 moves the exponent bias from 15 to 127, subnormals included.
  const float scaled = std::bit_cast<float>(magnitude << 13U) * 0x1p112F;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | sign);
}

}  // namespace annulus
