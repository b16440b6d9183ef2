// .safetensors files: the list of tensors, then each one as an array and as whole numbers.

#include <annulus/files/array_file.hpp>

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
    read_array(input, contents, name);
    read_integers(input, name);
  }
  return 0;
}
