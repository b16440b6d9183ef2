#include <algorithm>
#include <array>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/files/array_info.hpp>

namespace annulus::files {

namespace {

std::optional<std::int64_t> bytes_of(std::size_t element_bytes, const Extents& shape) {
  auto bytes = static_cast<std::int64_t>(element_bytes);
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) return std::nullopt;
    empty = empty || size == 0;
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : bytes;
}

}  // namespace

std::optional<std::int64_t> byte_count(DType dtype, const Extents& shape) {
  return bytes_of(size_of(dtype), shape);
}

void check_data_bytes(const std::string& path, const std::string& array, const std::string& dtype,
                      std::size_t element_bytes, const Extents& shape, std::int64_t found) {
  const std::optional<std::int64_t> expected = bytes_of(element_bytes, shape);
  if (expected == found) return;
  throw FileError(
      path, fmt::format("{}shape {} of {} does not fit the {} bytes of data: expected {}", array,
                        to_string(shape), dtype, found,
                        expected ? fmt::format("{} bytes", *expected)
                                 : "a shape whose bytes can be counted"));
}

std::string list_of(std::span<const DType> dtypes) {
  constexpr std::array kAll{DType::boolean,  DType::uint8,   DType::int32,  DType::float16,
                            DType::bfloat16, DType::float32, DType::float64};
  if (dtypes.empty()) dtypes = kAll;
  std::string list(name_of(dtypes.front()));
  for (std::size_t i = 1; i < dtypes.size(); ++i) {
    list += i + 1 < dtypes.size() ? ", " : " or ";
    list += name_of(dtypes[i]);
  }
  return list;
}

std::vector<PositionRanges> whole(const Extents& shape) {
  std::vector<PositionRanges> index;
  for (const std::int64_t size : shape) index.push_back(PositionRanges::all(size));
  return index;
}

}  // namespace annulus::files
