#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/tensor.hpp>
#include <annulus/files/array_writer.hpp>
#include <annulus/mesh/group.hpp>

#include "tests/support/scratch_directory.hpp"

namespace annulus::test {

inline std::string little_endian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>((value >> (8 * i)) & 0xffU);
  return text;
}

/// A .npy file with this dictionary, well-formed or not.
inline std::string npy(int major, const std::string& dictionary, const std::string& data) {
  return std::string("\x93NUMPY") + static_cast<char>(major) + '\0' +
         little_endian(dictionary.size() + 1, major == 1 ? 2 : 4) + dictionary + '\n' + data;
}

inline std::string npy_dictionary(const std::string& descr, const std::string& shape) {
  return "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }";
}

/// A .safetensors file with this header, well-formed or not.
inline std::string safetensors(const std::string& header, const std::string& data) {
  return little_endian(header.size(), 8) + header + data;
}

/// Writes a whole array to a file.
inline void write_array(const std::string& path, const std::string& tensor, DType dtype,
                        const Extents& shape, const void* values) {
  const std::shared_ptr<Control> group = make_self_group()->shared_control();
  files::ArrayWriter writer(*group, path, {{tensor, dtype, shape}});
  writer.write_slice(files::whole(shape), ConstTensorView(values, dtype, shape));
  writer.commit();
}

}  // namespace annulus::test
