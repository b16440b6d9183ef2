#pragma once

#include <functional>
#include <span>

#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::verification {

/// Fills a rank's part of an operand, a contiguous host tensor. `index` gives the global positions
/// that it holds along each dimension.
using FillPart = std::function<void(const TensorView& part, std::span<const PositionRanges> index)>;

/// The sources of a case's operands. Absent ones are drawn from the case's seed: queries, keys and
/// values standard normal, a bias of standard deviation 1, a mask of density ¾.
struct OperandFills {
  FillPart bias = {};
  FillPart mask = {};
  FillPart query = {};
  FillPart key = {};
  FillPart value = {};
};

}  // namespace annulus::verification
