#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include <annulus/attention/philox.hpp>

namespace annulus::verification {

/// The random choices of one problem, in order. (Distributions of <random> differ between
/// libraries.) Two draws must not be arguments of one call, as their order is undefined.
class Draws {
 public:
  Draws(std::uint64_t seed, int index)
      : key_(philox_key(seed)), index_(static_cast<std::uint32_t>(index)) {}

  std::uint32_t word() {
    if (used_ == words_.size()) {
      words_ = philox({block_++, index_, 0, kDrawStream}, key_);
      used_ = 0;
    }
    return words_[used_++];
  }
  /// 0 … n − 1, for n up to 2³² (biased by less than n / 2³²).
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>((std::uint64_t{word()} * static_cast<std::uint64_t>(n)) >>
                                     32U);
  }
  /// low … high, both included.
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return pick(std::span(choices.begin(), choices.size()));
  }
  template <class T>
  T pick(std::span<const T> choices) {
    return choices[static_cast<std::size_t>(below(static_cast<std::int64_t>(choices.size())))];
  }

 private:
  // Keeps these counters apart from other uses of the same seed.
  static constexpr std::uint32_t kDrawStream = 0x64726177;

  PhiloxKey key_;
  std::uint32_t index_;
  std::uint32_t block_ = 0;
  PhiloxCounter words_{};
  std::size_t used_ = words_.size();
};

}  // namespace annulus::verification
