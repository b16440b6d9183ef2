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
};

/// The mask must have no obstacle.
[[nodiscard]] inline MaskedKeys masked_keys(const LocalMask& mask, std::int64_t batches,
                                            std::int64_t rows, std::int64_t columns,
                                            std::int64_t tile_columns) {
  constexpr std::int64_t kFar = BatchKeys::kFar;
  const auto narrow = [](std::int64_t x) { return static_cast<std::int32_t>(x); };
  const std::int64_t low =
      mask.band.low == -Band::kUnlimited ? -kFar : std::clamp(mask.band.low, -kFar, kFar);
  const std::int64_t high =
      mask.band.high == Band::kUnlimited ? kFar : std::clamp(mask.band.high, -kFar, kFar);
  MaskedKeys keys;
  std::int32_t tiles = 0;
  for (std::int64_t b = 0; b < batches; ++b) {
    const auto i = static_cast<std::size_t>(b);
    BatchKeys batch;
    batch.first_tile = tiles;
    batch.rows = mask.padded() ? mask.row_lengths[i] : narrow(rows);
    batch.columns = mask.padded() ? mask.column_lengths[i] : narrow(columns);
    batch.low = narrow(low);
    batch.high = narrow(high);
    batch.share();
    for (std::int64_t row = 0; row < batch.rows; ++row) {
      keys.pairs +=
          std::max<std::int64_t>(0, std::min<std::int64_t>(batch.columns, row + high + 1) -
                                        std::max<std::int64_t>(0, row + low));
    }
    tiles += batch.tiles(narrow(tile_columns));
    keys.batches.push_back(batch);
  }
  keys.batches.push_back({.first_tile = tiles});
  return keys;
}

}  // namespace annulus::flash::decode
