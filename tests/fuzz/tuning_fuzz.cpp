// Persistent caches of tuning (--tuning-cache).

#include "fuzzing.hpp"
#include "tuning/text.hpp"

using namespace annulus;
using namespace annulus::ring;
using namespace annulus::test;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto entries = taken([&] { return parse_tuning(text_of(data, size), "input.json"); });
  if (!entries) return 0;
  require(parse_tuning(to_json(*entries), "again.json") == *entries,
          "a tuning cache is what its text says");
  return 0;
}
