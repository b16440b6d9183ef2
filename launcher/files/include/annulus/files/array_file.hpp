#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/dtype.hpp>
#include <annulus/core/file_descriptor.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/files/array_info.hpp>

namespace annulus::files {

/// An array in a file, open for reading by slices.
///
/// In a file whose name ends in ".safetensors", a tensor is chosen by name. Any other file is read
/// as .npy, format 1.0, 2.0 or 3.0. Arrays are bool, uint8, int32, float16, float32, float64 or
/// bfloat16, little-endian, in C order. NumPy has no bfloat16: its bits come as uint16 or, from
/// ml_dtypes, as '<V2'.
///
/// Nothing here communicates; if ranks must agree on an error, call it inside collectively().
class ArrayFile {
 public:
  /// Opens the file and checks its header against the file's size; reads no data. `tensor` names
  /// the tensor of a .safetensors file and is ignored for .npy. `accepted` lists the dtypes that
  /// the caller takes; empty: all. uint16 or '<V2' in a .npy file is accepted only if bfloat16
  /// alone is listed. Throws FileError naming the path, what was found and what is accepted.
  explicit ArrayFile(std::string path, std::string_view tensor = {},
                     const std::vector<DType>& accepted = {});

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] DType dtype() const noexcept { return info_.dtype; }
  [[nodiscard]] const Extents& shape() const noexcept { return info_.shape; }

  /// Reads the entries at `index` (positions per dimension) into a host view of that shape, of any
  /// strides and of the file's dtype. Touches only the parts of the file that it needs, and small
  /// gaps between them. Throws FileError when the file has shrunk, SystemError when reading fails,
  /// InternalError when index, view and file do not fit together. For bools, use read_flags().
  void read_slice(std::span<const PositionRanges> index, const TensorView& destination) const;
  /// The same for bool or uint8 whose entries must be 0 or 1. Throws ArgumentError("path[index]",
  /// …) for another value.
  void read_flags(std::span<const PositionRanges> index, const TensorView& destination) const;

 private:
  void read(std::span<const PositionRanges> index, const TensorView& destination, bool flags) const;

  std::string path_;
  FileDescriptor file_;
  ArrayInfo info_;
};

/// True if `path` is read as a .safetensors file.
[[nodiscard]] bool is_safetensors(std::string_view path);

/// Names of the tensors of a .safetensors file, sorted. Throws FileError.
[[nodiscard]] std::vector<std::string> tensor_names(const std::string& path);

}  // namespace annulus::files
