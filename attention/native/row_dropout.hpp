#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <annulus/attention/dropout.hpp>
#include <annulus/partition/position.hpp>

namespace annulus {

/// Keys that share four counters, and such blocks at a time: a tile of 512 keys, wherever it
/// begins.
inline constexpr std::int64_t kDropoutBlock = 32;
inline constexpr std::size_t kMostDropoutBlocks = 20;
/// The bits of the keys of some blocks, in the order of the keys.
using DropoutBits = std::array<std::uint16_t, kMostDropoutBlocks * kDropoutBlock>;

/// Zeroes those weights[i] that drop, i counting the columns. Row and head as in Dropout::drops().
void drop_row(const Dropout& dropout, std::int64_t batch, std::int64_t head, GlobalPosition row,
              const PositionRange& columns, float* weights);

}  // namespace annulus
