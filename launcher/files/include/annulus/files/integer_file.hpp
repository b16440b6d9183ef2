#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/file_descriptor.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::files {

/// A small array of whole numbers in a file, named as for ArrayFile: int32, or int64 (NumPy's
/// default) of values that int32 can hold.
class IntegerFile {
 public:
  /// Opens the file and checks its header. Throws FileError.
  explicit IntegerFile(std::string path, std::string_view tensor = {});

  [[nodiscard]] const Extents& shape() const noexcept { return shape_; }
  /// All values, the last dimension fastest. Throws ArgumentError("tensor[index]", …) for a value
  /// beyond int32, FileError or SystemError when reading fails.
  [[nodiscard]] std::vector<std::int32_t> read() const;

 private:
  template <class Integer>
  [[nodiscard]] std::vector<Integer> read_as() const;

  std::string path_;
  std::string tensor_;
  FileDescriptor file_;
  Extents shape_;
  std::int64_t offset_ = 0;
  bool wide_ = false;  // int64
};

}  // namespace annulus::files
