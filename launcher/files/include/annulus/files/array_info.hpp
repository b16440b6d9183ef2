#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <annulus/core/dtype.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::files {

/// One array of a file: C order, little-endian.
struct ArrayInfo {
  std::string name;  ///< of the tensor in a .safetensors file; empty for .npy
  DType dtype = DType::float32;
  Extents shape;
  std::int64_t offset = 0;  ///< of the first element from the start of the file, in bytes
};

/// Bytes of a dense array; nothing when a size is negative or the count does not fit 63 bits.
/// (Sizes of zero are counted as one in that test, so that strides are safe to compute as well.)
[[nodiscard]] std::optional<std::int64_t> byte_count(DType dtype, const Extents& shape);

/// Throws FileError unless an array of this shape takes exactly the `found` bytes that its file has
/// for it: neither missing nor left-over data are the array that was meant. `array` comes first in
/// the message, "tensor 'x': " or nothing; `dtype` is the file's name of the type.
void check_data_bytes(const std::string& path, const std::string& array, const std::string& dtype,
                      std::size_t element_bytes, const Extents& shape, std::int64_t found);

/// "float32, float16 or bfloat16"; for an empty list, all dtypes of files.
[[nodiscard]] std::string list_of(std::span<const DType> dtypes);

/// The index of a whole array: all positions of every dimension.
[[nodiscard]] std::vector<PositionRanges> whole(const Extents& shape);

}  // namespace annulus::files
