#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <unistd.h>

#include <annulus/mesh/bootstrap.hpp>
#include <annulus/mesh/key_value_store.hpp>

namespace annulus::test {

/// A key-value store in a folder: a file for each key.
class FileStore final : public KeyValueStore {
 public:
  explicit FileStore(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void set(const std::string& key, const std::string& value) override {
    const auto temporary =
        folder_ / ("." + std::to_string(::getpid()) + path_of(key).filename().string());
    std::ofstream(temporary, std::ios::binary) << value;
    std::filesystem::rename(temporary, path_of(key));
  }
  [[nodiscard]] std::optional<std::string> get(const std::string& key, double seconds) override {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    for (;;) {
      if (std::ifstream file(path_of(key), std::ios::binary); file) {
        return std::string(std::istreambuf_iterator<char>(file), {});
      }
      if (Clock::now() >= end) return {};
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  void remove(const std::string& key) override { std::filesystem::remove(path_of(key)); }

  /// The number of keys.
  [[nodiscard]] std::size_t size() const {
    std::size_t keys = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      if (entry.path().filename().string().front() != '.') ++keys;
    }
    return keys;
  }

 private:
  [[nodiscard]] std::filesystem::path path_of(std::string key) const {
    std::ranges::replace(key, '/', '%');
    return folder_ / key;
  }

  std::filesystem::path folder_;
};

}  // namespace annulus::test
