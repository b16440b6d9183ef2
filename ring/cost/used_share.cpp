#include <algorithm>

#include <annulus/core/division.hpp>
#include <annulus/ring/used_share.hpp>

namespace annulus::ring {
namespace {

// The longest tiles are computed first. Under a causal mask they take twice the mean.
constexpr double kLongestTile = 2;

// Losses of a tile of the backward pass, as rows that it could walk in the same time. kRowsOfATile:
// it loads its keys, and in the end adds their gradients. kRowsOfAnEdge, for each query head: at an
// edge of the mask it walks rows in part, after a look at their values. Measured on H200:
// benchmarks/NOTES.md.
constexpr double kRowsOfATile = 550;
constexpr double kRowsOfAnEdge = 250;

std::int64_t tiles_of(std::int64_t rows, std::int64_t tile) {
  return ceil_divide(rows, tile);
}

// The factor by which a kernel takes longer because its multiprocessors do not end together. With
// one tile each, the kernel takes as long as the longest tile; with more tiles each, times even
// out.
double unevenness(Place::Kind device, const BlockExtent& block) {
  if (device == Place::Kind::host || block.pairs == 0) return 1;
  const auto all =
      static_cast<double>(tiles_of(block.rows, kTileRows) * block.heads * block.batches);
  const double each = std::max(1.0, all / static_cast<double>(kMultiprocessors));
  return 1 + (longest_tile(block) - 1) / (each * each);
}

// The share of the computed rows that do not just fill up the last tile.
double visible_rows(const BlockExtent& block, std::int64_t row_tile) {
  return static_cast<double>(block.rows) /
         static_cast<double>(tiles_of(block.rows, row_tile) * row_tile);
}

}  // namespace

double busy_share(Place::Kind device, std::int64_t rows, std::int64_t heads) {
  if (device == Place::Kind::host) return 1;
  const std::int64_t tiles = tiles_of(rows, kTileRows) * heads;
  return std::clamp(static_cast<double>(tiles) / kMultiprocessors, 1.0 / kMultiprocessors, 1.0);
}

double longest_tile(const BlockExtent& block) {
  const auto all =
      static_cast<double>(block.rows * block.batches) * static_cast<double>(block.columns);
  return std::min(kLongestTile, all / static_cast<double>(block.pairs));
}

double used_share(Place::Kind device, const BlockExtent& block, std::int64_t row_tile) {
  return busy_share(device, block.rows, block.heads * block.batches) *
         visible_rows(block, row_tile) / unevenness(device, block);
}

double used_share_backward(Place::Kind device, const BlockExtent& block, std::int64_t row_tile,
                           std::int64_t joined_heads) {
  if (device == Place::Kind::host || block.pairs == 0) return 1;
  const auto columns = static_cast<double>(block.columns * block.batches);
  const bool full = block.pairs == block.rows * block.columns * block.batches;
  const std::int64_t heads = block.heads / joined_heads * block.batches;
  const double each = std::max(
      1.0, static_cast<double>(tiles_of(block.columns, kTileRows) * heads) / kMultiprocessors);
  const double rows = static_cast<double>(block.pairs) / columns;  // of a tile, on average
  const double lost = kRowsOfATile / static_cast<double>(joined_heads) + (full ? 0 : kRowsOfAnEdge);
  return busy_share(device, block.columns, heads) * visible_rows(block, row_tile) /
         std::max(1.0, longest_tile(block) / each) * rows / (rows + lost);
}

}  // namespace annulus::ring
