#pragma once

#include <cstdint>
#include <string>

#include <annulus/core/position.hpp>

namespace annulus {

/// Dropout of attention probabilities (docs/semantics.md §1). An entry's drop is a pure function of
/// the seed and the global batch, query head, query position and key position, so it is the same
/// for every sharding, schedule, kernel and block size.
///
/// One call of Philox 4x32-10 decides eight keys, with sixteen bits each. The eight are chosen so
/// that a thread of a tensor-core tile uses all the bits of a call: key j has half j mod 2 of word
/// (j mod 32) / 8 of counter 4 (j / 32) + (j mod 8) / 2. An entry drops if its bits are below
/// threshold().
class Dropout {
 public:
  /// The probability is rounded to a multiple of 2⁻¹⁶ above 0 and below 1; 0 stays 0. Throws
  /// ArgumentError("dropout", …) unless it is at least 0 and below 1.
  Dropout(double probability, std::uint64_t seed);

  [[nodiscard]] double probability() const { return threshold_ / 65536.0; }
  [[nodiscard]] std::uint64_t seed() const noexcept { return seed_; }
  [[nodiscard]] std::uint32_t threshold() const noexcept { return threshold_; }
  /// The factor of the probabilities that are kept.
  [[nodiscard]] double keep_scale() const { return 1 / (1 - probability()); }
  bool operator==(const Dropout&) const = default;

  /// True if an entry drops. All indices are global.
  [[nodiscard]] bool drops(std::int64_t batch, std::int64_t head, GlobalPosition row,
                           GlobalPosition column) const;

  /// The third and fourth words of a counter. The first depends on the key position; the second is
  /// the query position.
  static constexpr std::uint32_t third_word(std::int64_t head) {
    return static_cast<std::uint32_t>(head);
  }
  static constexpr std::uint32_t fourth_word(std::int64_t batch) {
    return static_cast<std::uint32_t>(batch) + kDropoutStream;
  }
  /// Sequence lengths, heads and batches must be below this, so that no two entries share bits.
  static constexpr std::int64_t kMaximumIndices = std::int64_t{1} << 32;

 private:
  static constexpr std::uint32_t kDropoutStream = 0x64726f70;  // apart from a seed's other uses
  std::uint32_t threshold_;
  std::uint64_t seed_;
};

/// "dropout 0.1, seed 5".
[[nodiscard]] std::string to_string(const Dropout& dropout);

}  // namespace annulus
