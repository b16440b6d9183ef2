#include "mask/band_pairs.hpp"

#include <algorithm>

#include <annulus/core/division.hpp>

namespace annulus {
namespace {

// Σ floor((a·i + b) / m) over 0 ≤ i < n, for a, b ≥ 0 and m > 0: Euclid's algorithm, each step
// counting the lattice points under the line that whole multiples of m leave.
std::int64_t floor_sum(std::int64_t n, std::int64_t m, std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  while (n > 0) {
    sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
    a %= m;
    b %= m;
    const std::int64_t top = a * n + b;
    n = top / m;
    b = top % m;
    std::swap(a, m);
  }
  return sum;
}

// Pairs with column − row ≤ d.
std::int64_t pairs_up_to(const PositionRange& rows, const PositionRange& columns, std::int64_t d) {
  if (d == -Band::kUnlimited) return 0;
  if (d == Band::kUnlimited) return rows.length * columns.length;
  // Row i sees floor((i · row stride − ahead) / column stride) + 1 columns, if that is in range.
  const std::int64_t ahead = columns.start - rows.start - d;
  const std::int64_t span = (columns.length - 1) * columns.stride;
  const std::int64_t first =
      std::clamp<std::int64_t>(ceil_divide(ahead, rows.stride), 0, rows.length);
  const std::int64_t all =
      std::clamp<std::int64_t>(ceil_divide(ahead + span, rows.stride), 0, rows.length);
  const std::int64_t rising = all - first;
  return floor_sum(rising, columns.stride, rows.stride, first * rows.stride - ahead) + rising +
         columns.length * (rows.length - all);
}

}  // namespace

std::int64_t band_pairs(const Band& band, const PositionRange& rows, const PositionRange& columns) {
  if (rows.length == 0 || columns.length == 0) return 0;
  const std::int64_t least = columns.start - rows.last();
  const std::int64_t most = columns.last() - rows.start;
  if (band.low <= least && most <= band.high) return rows.length * columns.length;
  const std::int64_t below = band.low == -Band::kUnlimited ? band.low : band.low - 1;
  return pairs_up_to(rows, columns, band.high) - pairs_up_to(rows, columns, below);
}

}  // namespace annulus
