#pragma once

#include <optional>
#include <string>

#include <annulus/launcher/files/array_info.hpp>
#include <annulus/launcher/files/file_descriptor.hpp>

namespace annulus::launcher {

/// Reads and checks the header of a .npy file of format 1.0, 2.0 or 3.0 (the format is described in
/// numpy/lib/format.py). uint16 is accepted only when `dtype` is bfloat16. Throws FileError.
[[nodiscard]] ArrayInfo read_npy_header(const FileDescriptor& file, const std::string& path,
                                        std::optional<DType> dtype);

/// The header of format 1.0, padded so that the data behind it starts at a multiple of 64 bytes.
[[nodiscard]] std::string make_npy_header(DType dtype, const Extents& shape);

}  // namespace annulus::launcher
