#pragma once

#include <cstdint>

#include <annulus/core/place.hpp>

namespace annulus::ring {

/// Kernels for GPUs compute tiles of so many rows of one head, one after the other on each of the
/// multiprocessors of a Hopper GPU.
inline constexpr std::int64_t kTileRows = 128;
inline constexpr std::int64_t kMultiprocessors = 132;

/// What of a block decides how much of a device it uses.
struct BlockExtent {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t heads = 0;
  std::int64_t batches = 0;
  std::int64_t pairs = 0;  ///< visible ones, of all batches
};

/// The share of a device that a block of so many rows and heads (over all batches) keeps busy. All
/// of a CPU rank: its kernels divide any work among the threads.
[[nodiscard]] double busy_share(Place::Kind device, std::int64_t rows, std::int64_t heads);

/// How many times as long as the mean the longest tile takes: under a causal mask up to twice.
[[nodiscard]] double longest_tile(const BlockExtent& block);

/// The share of its rate that a device keeps for the visible pairs of a block, by a kernel that
/// computes `row_tile` rows at a time: some multiprocessors have no tile, those that end first wait
/// for the longest one, and rows that fill up the last tile are computed in vain. Calibration
/// divides by what the price multiplies by, so that a block of the measured size costs what was
/// measured.
[[nodiscard]] double used_share(Place::Kind device, const BlockExtent& block,
                                std::int64_t row_tile);

}  // namespace annulus::ring
