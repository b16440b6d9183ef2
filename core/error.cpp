#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus {

ArgumentError::ArgumentError(std::string argument, std::string value, std::string expected)
    : UserError(fmt::format("{}: got {}, expected {}", argument, value, expected)),
      argument_(std::move(argument)),
      value_(std::move(value)),
      expected_(std::move(expected)) {}

FileError::FileError(std::string path, const std::string& problem)
    : UserError(fmt::format("{}: {}", path, problem)), path_(std::move(path)) {}

SystemError::SystemError(const std::string& operation, int error_number)
    : LibraryError(fmt::format("{}: {}", operation, std::strerror(error_number))) {}

}  // namespace annulus
