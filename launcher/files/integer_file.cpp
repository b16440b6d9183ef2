#include <limits>
#include <span>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/files/array_file.hpp>
#include <annulus/files/array_info.hpp>
#include <annulus/files/integer_file.hpp>

#include "formats/npy.hpp"
#include "formats/safetensors.hpp"

namespace annulus::files {

IntegerFile::IntegerFile(std::string path, std::string_view tensor)
    : path_(std::move(path)), tensor_(tensor), file_(open_for_reading(path_)) {
  std::string array;
  std::string dtype;
  std::int64_t bytes = 0;
  if (is_safetensors(path_)) {
    const std::vector<SafetensorsEntry> entries = read_safetensors_header(file_, path_);
    const SafetensorsEntry& entry = find_entry(entries, path_, tensor);
    array = fmt::format("tensor '{}': ", tensor);
    dtype = entry.dtype;
    shape_ = Extents(entry.shape);
    offset_ = entry.offset;
    bytes = entry.bytes;
  } else {
    const NpyHeader header = read_npy_header(file_, path_);
    dtype = header.descr;
    shape_ = header.shape;
    offset_ = header.offset;
    bytes = header.data_bytes;
  }
  wide_ = dtype == "<i8" || dtype == "I64";
  if (!wide_ && dtype != "<i4" && dtype != "I32") {
    throw FileError(path_, fmt::format("dtype '{}', expected int32 or int64", dtype));
  }
  check_data_bytes(path_, array, dtype, wide_ ? sizeof(std::int64_t) : sizeof(std::int32_t), shape_,
                   bytes);
}

template <class Integer>
std::vector<Integer> IntegerFile::read_as() const {
  std::vector<Integer> values(static_cast<std::size_t>(shape_.product()));
  read_at(file_, path_, offset_, std::as_writable_bytes(std::span(values)));
  return values;
}

std::vector<std::int32_t> IntegerFile::read() const {
  if (!wide_) return read_as<std::int32_t>();
  using Limits = std::numeric_limits<std::int32_t>;
  const std::vector<std::int64_t> wide = read_as<std::int64_t>();
  std::vector<std::int32_t> values;
  values.reserve(wide.size());
  for (std::size_t i = 0; i < wide.size(); ++i) {
    if (wide[i] < Limits::min() || wide[i] > Limits::max()) {
      throw ArgumentError(fmt::format("{}[{}]", tensor_, i), std::to_string(wide[i]),
                          "a number that fits 32 bits");
    }
    values.push_back(static_cast<std::int32_t>(wide[i]));
  }
  return values;
}

}  // namespace annulus::files
