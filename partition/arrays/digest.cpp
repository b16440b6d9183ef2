#include "arrays/digest.hpp"

#include <cstdint>
#include <cstring>

#include <fmt/format.h>

namespace annulus {
namespace {

// One lane: each step is a bijection of the state, so a single changed word always shows.
class Lane {
 public:
  explicit Lane(std::uint64_t multiplier) : state_(multiplier), multiplier_(multiplier) {}
  void add(std::uint64_t word) {
    state_ = (state_ ^ word) * multiplier_;
    state_ ^= state_ >> 29U;
  }
  [[nodiscard]] std::uint64_t state() const { return state_; }

 private:
  std::uint64_t state_;
  std::uint64_t multiplier_;  // odd
};

}  // namespace

std::string digest(const void* data, std::size_t bytes) {
  Lane first(0x9e3779b97f4a7c15U);   // 2^64 / golden ratio
  Lane second(0xd1342543de82ef95U);  // a multiplier of full-period generators
  const auto add = [&](std::uint64_t word) {
    first.add(word);
    second.add(word);
  };
  add(bytes);
  const auto* next = static_cast<const std::byte*>(data);
  for (std::size_t left = bytes; left > 0;) {
    std::uint64_t word = 0;
    const std::size_t taken = left < sizeof(word) ? left : sizeof(word);
    std::memcpy(&word, next, taken);
    add(word);
    next += taken;
    left -= taken;
  }
  return fmt::format("{:016x}{:016x}", first.state(), second.state());
}

}  // namespace annulus
