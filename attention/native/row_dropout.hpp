#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <annulus/attention/problem.hpp>
#include <annulus/core/position.hpp>

#include "native/row_softmax.hpp"

namespace annulus {

/// The number of keys that share four counters, and the most such blocks that are drawn at a time:
/// enough for a tile of 512 keys, wherever it begins.
inline constexpr std::int64_t kDropoutBlock = 32;
inline constexpr std::size_t kMaximumDropoutBlocks = 20;
/// The random bits for the keys of some blocks, in key order.
using DropoutBits = std::array<std::uint16_t, kMaximumDropoutBlocks * kDropoutBlock>;

/// Sets the weights of dropped `columns` to 0. Batch, head and row are global, as in
/// Dropout::drops().
void drop_row(const Dropout& dropout, std::int64_t batch, std::int64_t head, GlobalPosition row,
              const PositionRange& columns, const WeightRow& weights);

}  // namespace annulus
