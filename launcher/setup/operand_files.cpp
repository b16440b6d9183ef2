#include "launcher/setup/operand_files.hpp"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>

#include <annulus/files/array_file.hpp>

namespace annulus::launcher {

OperandFiles::OperandFiles(const Options& options) : input_(options.input) {
  if (!input_.empty()) input_tensors_ = files::tensor_names(input_);
}

OperandFile OperandFiles::locate(const std::string& option, const std::string& given) const {
  std::string tensor = option.substr(2);  // without dashes
  std::ranges::replace(tensor, '-', '_');
  if (!given.empty()) return {given, fmt::format("{} {}", option, given), tensor};
  if (std::ranges::find(input_tensors_, tensor) == input_tensors_.end()) return {};
  return {input_, fmt::format("--input {}, tensor {}", input_, tensor), tensor};
}

const char* random_value(const std::string& given) {
  constexpr std::string_view kRandom = "random:";
  return given.starts_with(kRandom) ? given.c_str() + kRandom.size() : nullptr;
}

}  // namespace annulus::launcher
