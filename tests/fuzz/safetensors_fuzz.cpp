// .safetensors files: the list of tensors, then each one as an array and as whole numbers.

#include <annulus/files/array_file.hpp>
#include <annulus/files/integer_file.hpp>

#include "fuzzing.hpp"

using namespace annulus;
using namespace annulus::test;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const InputFile input("input.safetensors");
  const std::string_view contents = text_of(data, size);
  input.set(contents);
  const auto names = taken([&] { return files::tensor_names(input.path()); });
  const auto absent = taken([&] { return files::ArrayFile(input.path(), "no such tensor"); });
  require(!absent, "a tensor that is not there is refused");
  if (!names) return 0;
  for (const std::string& name : *names) {
    const auto file = taken([&] { return files::ArrayFile(input.path(), name); });
    if (file) (void)reads_right(*file, contents);
    const auto numbers = taken([&] { return files::IntegerFile(input.path(), name); });
    if (!numbers) continue;
    const auto values = taken([&] { return numbers->read(); });
    require(!values || static_cast<std::int64_t>(values->size()) == numbers->shape().product(),
            "there are as many numbers as the shape says");
  }
  return 0;
}
