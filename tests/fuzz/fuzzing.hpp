#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <annulus/core/dtype.hpp>
#include <annulus/core/error.hpp>

/// The function that libFuzzer, or replay.cpp, calls for every input. Each *_fuzz.cpp defines it
/// for one kind of
/// text or file: any input must be taken or refused by a UserError, and what is taken must hold
/// together. Everything else (a crash, another exception, a require() that fails) is a finding.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace annulus::test {

[[nodiscard]] inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Ends the process with this sentence unless the claim holds.
void require(bool holds, const char* claim);

/// Returns what parse() returns, or nothing if it refuses the input.
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

/// Opens an array and reads it in one piece and every other entry of it. Unless that is refused, as
/// for a bool that is neither 0 nor 1, both must be the bytes that its file holds.
void read_array(const InputFile& input, std::string_view contents, const std::string& tensor = {},
                const std::vector<DType>& accepted = {});

/// Reads an array as whole numbers, unless that is refused.
void read_integers(const InputFile& input, const std::string& tensor = {});

}  // namespace annulus::test
