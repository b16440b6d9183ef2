#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <fcntl.h>
#include <optional>
#include <string_view>
#include <sys/resource.h>
#include <unistd.h>

#include <fmt/format.h>

#include <annulus/core/bytes.hpp>
#include <annulus/core/host_memory.hpp>

namespace annulus {
namespace {

// The number after a name such as "MemTotal:", in bytes.
std::optional<std::uint64_t> bytes_of(std::string_view name, std::string_view meminfo) {
  const std::size_t at = meminfo.find(name);
  if (at == std::string_view::npos) return {};
  std::string_view rest = meminfo.substr(at + name.size());
  rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
  std::uint64_t kib = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), kib);
  if (error != std::errc()) return {};
  return kib << 10U;
}

std::string state() {
  // A stream would need memory.
  std::array<char, 4096> text{};
  const int file = ::open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
  const ::ssize_t count = file < 0 ? 0 : ::read(file, text.data(), text.size());
  if (file >= 0) ::close(file);
  const std::string_view meminfo(text.data(), count > 0 ? static_cast<std::size_t>(count) : 0);
  const auto total = bytes_of("MemTotal:", meminfo);
  const auto available = bytes_of("MemAvailable:", meminfo);
  std::string result;
  if (total && available) {
    result = fmt::format("{} of the host's {} are available", human_bytes(*available),
                         human_bytes(*total));
  }
  ::rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    result += fmt::format("{}this process may have {}", result.empty() ? "" : ", ",
                          human_bytes(limit.rlim_cur));
  }
  return result;
}

}  // namespace

std::string host_memory_state() noexcept {
  try {
    return state();
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace annulus
