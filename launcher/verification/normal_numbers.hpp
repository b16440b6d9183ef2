#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <annulus/attention/philox.hpp>
#include <annulus/verification/random_tensor.hpp>

namespace annulus::verification {

/// Standard normal numbers by index, four to a counter of Philox 4x32-10, by the transform of Box &
/// Muller (1958) in float32.
///
/// A number's bits depend only on seed, operand and index, not on the requested run or the
/// instruction set (x86-64 and AArch64), so ranks on different CPUs see the same tensor.
class NormalNumbers {
 public:
  NormalNumbers(std::uint64_t seed, Operand operand) : key_(philox_key(seed)), operand_(operand) {}

  /// The numbers of the indices [first, first + count), valid until the next call.
  const float* run(std::uint64_t first, std::int64_t count);

  /// The number of counters in a batch; no vector is longer.
  static constexpr std::size_t kBatch = 16;
  /// Keeps these counters apart from other uses of the same seed.
  static constexpr std::uint32_t kTensorStream = 0x74656e73;

 private:
  PhiloxKey key_;
  Operand operand_;
  std::vector<float> numbers_;
};

}  // namespace annulus::verification
