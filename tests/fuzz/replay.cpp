// Feeds every file of the folders that it is given to a fuzzer's function, for compilers without
// libFuzzer (which does the same when called with -runs=0).

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "fuzzing.hpp"

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> inputs;
  for (const char* folder : std::vector<const char*>(argv + 1, argv + argc)) {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      inputs.push_back(entry.path());
    }
  }
  std::sort(inputs.begin(), inputs.end());
  if (inputs.empty()) {
    std::fputs("no inputs\n", stderr);
    return 1;
  }
  for (const std::filesystem::path& input : inputs) {
    std::ifstream file(input, std::ios::binary);
    const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
    std::printf("%s: %zu bytes\n", input.c_str(), bytes.size());
    (void)std::fflush(stdout);  // the last line names the input that failed
    // A copy of exactly its size: a sanitizer sees the first byte read past the end.
    const std::vector<std::uint8_t> data(bytes.begin(), bytes.end());
    (void)LLVMFuzzerTestOneInput(data.data(), data.size());
  }
  std::printf("%zu inputs\n", inputs.size());
  return 0;
}
