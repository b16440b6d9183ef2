#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/files/array_file.hpp>

#include "formats/npy.hpp"
#include "formats/safetensors.hpp"
#include "slice_runs.hpp"

namespace annulus::files {
namespace {

// Reading this many unneeded bytes costs less than another system call.
constexpr std::int64_t kMaxReadGap = std::int64_t{16} << 10;

// The index of an element, given its row-major number: "2, 0, 5".
std::string index_text(const Extents& shape, std::int64_t number) {
  std::string text;
  for (int dim = shape.rank() - 1; dim >= 0; --dim) {
    text = std::to_string(number % shape[dim]) + (text.empty() ? "" : ", ") + text;
    number /= shape[dim];
  }
  return text;
}

}  // namespace

ArrayFile::ArrayFile(std::string path, std::string_view tensor, const std::vector<DType>& accepted)
    : path_(std::move(path)), file_(open_for_reading(path_)) {
  info_ = is_safetensors(path_)
              ? find_tensor(read_safetensors_header(file_, path_), path_, tensor, accepted)
              : find_array(read_npy_header(file_, path_), path_, accepted);
  if (!accepted.empty() &&
      std::find(accepted.begin(), accepted.end(), info_.dtype) == accepted.end()) {
    throw FileError(path_, fmt::format("{}dtype {}, expected {}",
                                       info_.name.empty() ? "" : "tensor '" + info_.name + "': ",
                                       name_of(info_.dtype), list_of(accepted)));
  }
}

void ArrayFile::read_slice(std::span<const PositionRanges> index,
                           const TensorView& destination) const {
  // A C++ bool that is neither 0 nor 1 is undefined behaviour.
  read(index, destination, info_.dtype == DType::boolean);
}

void ArrayFile::read_flags(std::span<const PositionRanges> index,
                           const TensorView& destination) const {
  if (size_of(info_.dtype) != 1) {
    throw InternalError(fmt::format("{} of {} read as flags", path_, name_of(info_.dtype)));
  }
  read(index, destination, true);
}

void ArrayFile::read(std::span<const PositionRanges> index, const TensorView& destination,
                     bool flags) const {
  if (destination.dtype() != info_.dtype) {
    throw InternalError(fmt::format("{} of {} read as {}", path_, name_of(info_.dtype),
                                    name_of(destination.dtype())));
  }
  auto* const memory = static_cast<std::byte*>(destination.data());
  const auto size = [](std::int64_t bytes) { return static_cast<std::size_t>(bytes); };
  std::vector<std::byte> staging;
  for_each_transfer(info_.shape, index, destination, kMaxReadGap, [&](std::span<const Run> runs) {
    const Run& first = runs.front();
    if (runs.size() == 1) {
      read_at(file_, path_, info_.offset + first.file, {memory + first.memory, size(first.bytes)});
    } else {
      staging.resize(size(runs.back().file_end() - first.file));
      read_at(file_, path_, info_.offset + first.file, staging);
      for (const Run& run : runs) {
        std::memcpy(memory + run.memory, staging.data() + (run.file - first.file), size(run.bytes));
      }
    }
    if (!flags) return;
    for (const Run& run : runs) {
      const std::byte* begin = memory + run.memory;
      const std::byte* end = begin + run.bytes;
      const auto* bad = std::find_if(begin, end, [](std::byte b) { return b > std::byte{1}; });
      if (bad == end) continue;
      throw ArgumentError(
          fmt::format("{}[{}]", path_, index_text(info_.shape, run.file + (bad - begin))),
          std::to_string(std::to_integer<int>(*bad)), "0 or 1");
    }
  });
}

bool is_safetensors(std::string_view path) {
  return path.ends_with(".safetensors");
}

std::vector<std::string> tensor_names(const std::string& path) {
  std::vector<std::string> names;
  for (SafetensorsEntry& entry : read_safetensors_header(open_for_reading(path), path)) {
    names.push_back(std::move(entry.name));
  }
  return names;
}

}  // namespace annulus::files
