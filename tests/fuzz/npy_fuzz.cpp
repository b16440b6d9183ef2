// .npy files: as an array of any dtype, as bfloat16, and as whole numbers.

#include "fuzzing.hpp"

using namespace annulus::test;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const InputFile input("input.npy");
  const std::string_view contents = text_of(data, size);
  input.set(contents);
  read_array(input, contents);
  read_array(input, contents, "", {annulus::DType::bfloat16});
  read_integers(input);
  return 0;
}
