#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/file_descriptor.hpp>
#include <annulus/files/array_info.hpp>

namespace annulus::files {

/// An uninterpreted entry of the header of a .safetensors file.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< "F16"
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;  ///< from the start of the file, in bytes
  std::int64_t bytes = 0;
};

/// Reads and checks the header of a .safetensors file: 8 bytes of length, that many bytes of JSON,
/// then tensors that follow each other without gap or overlap up to the end of the file. Entries
/// come sorted by name. Throws FileError.
[[nodiscard]] std::vector<SafetensorsEntry> read_safetensors_header(const FileDescriptor& file,
                                                                    const std::string& path);

/// The entry of a name. Throws FileError, listing the names of the file, if there is none, and for
/// too many dimensions.
[[nodiscard]] const SafetensorsEntry& find_entry(std::span<const SafetensorsEntry> entries,
                                                 const std::string& path, std::string_view name);

/// The tensor called `name`, with a dtype and a shape that we can read. Throws FileError listing
/// the names of the file.
[[nodiscard]] ArrayInfo find_tensor(std::span<const SafetensorsEntry> entries,
                                    const std::string& path, std::string_view name,
                                    std::span<const DType> accepted);

/// Places the arrays one after another (setting their offsets) and returns the header.
[[nodiscard]] std::string make_safetensors_header(std::span<ArrayInfo> arrays);

}  // namespace annulus::files
