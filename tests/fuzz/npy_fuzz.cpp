// .npy files: as an array of any dtype, as bfloat16, and as whole numbers.

#include <vector>

#include <annulus/files/array_file.hpp>
#include <annulus/files/integer_file.hpp>

#include "fuzzing.hpp"

using namespace annulus;
using namespace annulus::test;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const InputFile input("input.npy");
  const std::string_view contents = text_of(data, size);
  input.set(contents);
  for (const std::vector<DType>& accepted : {std::vector<DType>{}, {DType::bfloat16}}) {
    const auto file = taken([&] { return files::ArrayFile(input.path(), {}, accepted); });
    if (file) (void)reads_right(*file, contents);
  }
  const auto numbers = taken([&] { return files::IntegerFile(input.path()); });
  if (numbers) {
    const auto values = taken([&] { return numbers->read(); });
    require(!values || static_cast<std::int64_t>(values->size()) == numbers->shape().product(),
            "there are as many numbers as the shape says");
  }
  return 0;
}
