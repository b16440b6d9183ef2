#pragma once

#include <cstdint>
#include <vector>

#include <annulus/core/tensor.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>

namespace annulus {

/// Sums the terms of the ranks of a group, element by element, in order of rank and, on a rank, in
/// their order. `mine`: this rank's terms one after the other, each with as many elements as `sum`;
/// `terms`: the number of terms of each rank. Contiguous host memory of one floating-point dtype.
/// Sums are made in float32 at least, and rounded once; without terms the sum is 0. Collective over
/// the group; all ranks get the same bits.
void add_terms(Group& group, const Watchdog& watchdog, const std::vector<std::int64_t>& terms,
               const ConstTensorView& mine, const TensorView& sum);

}  // namespace annulus
