#pragma once

#include <cstdint>

#include <annulus/core/place.hpp>

namespace annulus::ring {

/// A GPU kernel cuts the rows of each head into tiles of kTileRows. Each of the multiprocessors, as
/// many as a Hopper GPU has, computes one tile at a time.
inline constexpr std::int64_t kTileRows = 128;
inline constexpr std::int64_t kMultiprocessors = 132;

/// The sizes of a block that determine how much of a device it uses.
struct BlockExtent {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t heads = 0;
  std::int64_t batches = 0;
  std::int64_t pairs = 0;  ///< visible ones, of all batches
};

/// The share of a device that a block keeps busy; `heads` counts the heads of all batches. It is 1
/// on a CPU, whose kernels divide any work among the threads.
[[nodiscard]] double busy_share(Place::Kind device, std::int64_t rows, std::int64_t heads);

/// The time of the longest tile over the mean: up to 2 under a causal mask.
[[nodiscard]] double longest_tile(const BlockExtent& block);

/// The share of a device's rate that a block's visible pairs get from a kernel that computes
/// `row_tile` rows at a time. The rest is lost: some multiprocessors have no tile, the first to
/// finish wait for the longest one, and rows that fill up the last tile are wasted. Calibration
/// divides by this share and prices multiply by it, so a block of the measured size gets the
/// measured time.
[[nodiscard]] double used_share(Place::Kind device, const BlockExtent& block,
                                std::int64_t row_tile);
/// The same for the backward pass. Its kernels cut the columns of each head into tiles, and a tile
/// walks over the rows. Each multiprocessor takes one tile at a time, the longest first.
/// `joined_heads` query heads share a tile. Short walks lose more, since every tile also loads its
/// keys and adds their gradients.
[[nodiscard]] double used_share_backward(Place::Kind device, const BlockExtent& block,
                                         std::int64_t row_tile, std::int64_t joined_heads);

}  // namespace annulus::ring
