#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <annulus/attention/local_mask.hpp>

#include "flash/decode/key_split.hpp"

namespace annulus::flash::decode {

/// The visible columns of a block under a mask, for a KeySplit.
struct MaskedKeys {
  std::vector<BatchKeys> batches;  ///< and one more entry behind the last
  std::int64_t pairs = 0;          ///< visible ones, of all batches
  std::int32_t band_low = 0;       ///< of the band, within ±kFar
  std::int32_t band_high = 0;

  static constexpr std::int64_t kFar = 1 << 29;
};

/// The mask must have no obstacle.
[[nodiscard]] inline MaskedKeys masked_keys(const LocalMask& mask, std::int64_t batches,
                                            std::int64_t rows, std::int64_t columns,
                                            std::int64_t tile_columns) {
  const auto narrow = [](std::int64_t x) { return static_cast<std::int32_t>(x); };
  const auto within_far = [](std::int64_t x) {
    return std::clamp(x, -MaskedKeys::kFar, MaskedKeys::kFar);
  };
  const std::int64_t low =
      mask.band.low == -Band::kUnlimited ? -MaskedKeys::kFar : within_far(mask.band.low);
  const std::int64_t high =
      mask.band.high == Band::kUnlimited ? MaskedKeys::kFar : within_far(mask.band.high);
  MaskedKeys keys;
  keys.band_low = narrow(low);
  keys.band_high = narrow(high);
  std::int64_t tiles = 0;
  for (std::int64_t b = 0; b < batches; ++b) {
    const auto i = static_cast<std::size_t>(b);
    const std::int64_t live = mask.padded() ? mask.row_lengths[i] : rows;
    const std::int64_t length = mask.padded() ? mask.column_lengths[i] : columns;
    const std::int64_t begin = std::max<std::int64_t>(0, live - 1 + low);
    const std::int64_t end = live == 0 ? begin : std::max(begin, std::min(length, high + 1));
    keys.batches.push_back(
        {narrow(tiles), narrow(begin), narrow(end), narrow(live), narrow(length)});
    tiles += (end - begin + tile_columns - 1) / tile_columns;
    for (std::int64_t row = 0; row < live; ++row) {
      keys.pairs += std::max<std::int64_t>(
          0, std::min(length, row + high + 1) - std::max<std::int64_t>(0, row + low));
    }
  }
  keys.batches.push_back({narrow(tiles)});
  return keys;
}

}  // namespace annulus::flash::decode
