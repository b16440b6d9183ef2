#pragma once

#include <cstdint>

#include <annulus/attention/position_rule.hpp>

namespace annulus::ring {

/// The arguments of one call, of up to kMaximumBatches batches, on their way to the arrays that the
/// kernels of a device read (CallArgumentArrays). Plain data: it travels as a kernel's parameter.
struct CallArgumentWrite {
  static constexpr int kMaximumBatches = 256;

  /// A number for each batch. Arrays are the device's, from the first batch on.
  struct Numbers {
    std::int32_t* to = nullptr;          ///< null: there is nothing to write
    const std::int32_t* from = nullptr;  ///< null: the numbers in `given`
    std::int64_t stride = 0;             ///< of `from`; 0: one number for all batches
    /// The largest allowed numbers, from 0 on; null: any are allowed.
    const std::int32_t* maximum = nullptr;
    /// Host memory that the device can write, for a number that is not allowed: the number in the
    /// lower half, its batch + 1 in the upper half.
    volatile std::uint64_t* refused = nullptr;
    std::int32_t given[kMaximumBatches] = {};
  };
  Numbers query_lengths, kv_lengths, offsets;
  std::int32_t first_batch = 0;  ///< global
  std::int32_t batches = 0;

  std::uint32_t* dropout_key = nullptr;        ///< null: there is nothing to write
  const std::uint64_t* device_seed = nullptr;  ///< null: `seed`
  std::uint64_t seed = 0;

  /// Writes one number. Host and device code call it.
  ANNULUS_HOST_DEVICE void write(const Numbers& numbers, int batch) const {
    if (numbers.to == nullptr) return;
    std::int32_t number =
        numbers.from == nullptr ? numbers.given[batch] : numbers.from[batch * numbers.stride];
    if (numbers.maximum != nullptr && (number < 0 || number > numbers.maximum[batch])) {
      *numbers.refused = static_cast<std::uint64_t>(first_batch + batch + 1) << 32U |
                         static_cast<std::uint32_t>(number);
      number = number < 0 ? 0 : numbers.maximum[batch];
    }
    numbers.to[batch] = number;
  }
  ANNULUS_HOST_DEVICE void write_key() const {
    if (dropout_key == nullptr) return;
    const std::uint64_t words = device_seed == nullptr ? seed : *device_seed;
    dropout_key[0] = static_cast<std::uint32_t>(words);  // in the order of philox_key()
    dropout_key[1] = static_cast<std::uint32_t>(words >> 32U);
  }
};

}  // namespace annulus::ring
