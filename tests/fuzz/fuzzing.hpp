#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <annulus/core/error.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/files/array_file.hpp>

/// What libFuzzer, or replay.cpp, calls for every input. Each *_fuzz.cpp defines it for one kind of
/// text or file: any input must be taken or refused by a UserError, and what is taken must hold
/// together. Everything else (a crash, another exception, a require() that fails) is a finding.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace annulus::test {

[[nodiscard]] inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Ends the process with this sentence unless the claim holds.
void require(bool holds, const char* claim);

/// What parse() returns, or nothing if it refuses the input.
template <class Parse>
auto taken(Parse&& parse) -> std::optional<decltype(parse())> {
  try {
    return std::forward<Parse>(parse)();
  } catch (const UserError&) {
    return std::nullopt;
  }
}

/// A file whose contents change from input to input, in a folder of its own.
class InputFile {
 public:
  explicit InputFile(const char* name);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  void set(std::string_view contents) const;

 private:
  std::string folder_;
  std::string path_;
};

/// Reads an array in one piece and every other entry of it, and compares both with the bytes of its
/// file. False if reading is refused, as for a bool that is neither 0 nor 1.
bool reads_right(const files::ArrayFile& file, std::string_view contents);

}  // namespace annulus::test
