#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <annulus/core/file_descriptor.hpp>
#include <annulus/files/array_info.hpp>

namespace annulus::files {

/// The header of a .npy file.
struct NpyHeader {
  std::string descr;  ///< NumPy's name of the dtype: "<f4"
  Extents shape;
  std::int64_t offset = 0;      ///< of the first element
  std::int64_t data_bytes = 0;  ///< from there to the end of the file
};

/// Reads and checks the header of a .npy file of format 1.0, 2.0 or 3.0 (described in
/// numpy/lib/format.py), except its dtype. Throws FileError.
[[nodiscard]] NpyHeader read_npy_header(const FileDescriptor& file, const std::string& path);

/// The array of a header. uint16 is taken as bfloat16 only if nothing else is accepted; an empty
/// `accepted` accepts every other dtype. Throws FileError for an unknown dtype, or other bytes of
/// data than the shape has.
[[nodiscard]] ArrayInfo find_array(const NpyHeader& header, const std::string& path,
                                   std::span<const DType> accepted);

/// The header of format 1.0, padded so that the data behind it starts at a multiple of 64 bytes.
[[nodiscard]] std::string make_npy_header(DType dtype, const Extents& shape);

}  // namespace annulus::files
