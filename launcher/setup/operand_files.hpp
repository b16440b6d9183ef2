#pragma once

#include <string>
#include <vector>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// The file of an operand, and its name in messages. The path is empty if there is none.
struct OperandFile {
  std::string path;
  std::string shown;   ///< "--kv-lengths kv.npy"
  std::string tensor;  ///< "kv_lengths": its name in a .safetensors file
  [[nodiscard]] bool empty() const { return path.empty(); }
};

/// The files of masks, bias and sinks. Each operand has its own option, or else is in --input.
class OperandFiles {
 public:
  explicit OperandFiles(const Options& options);

  /// The file that holds the tensor of an option. `given` is the option's value.
  [[nodiscard]] OperandFile locate(const std::string& option, const std::string& given) const;

 private:
  std::string input_;
  std::vector<std::string> input_tensors_;
};

/// The number after "random:" in a value such as "random:0.5"; null if the value is a file's name.
[[nodiscard]] const char* random_value(const std::string& given);

}  // namespace annulus::launcher
