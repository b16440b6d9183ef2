#pragma once

#include <cstdint>
#include <span>

#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/verification/operand_fills.hpp>

namespace annulus::verification {

/// The operands that the generator fills.
enum class Operand : std::uint8_t {
  query = 0,
  key = 1,
  value = 2,
  bias = 3,
  grad_output = 4,
  grad_lse = 5
};

/// Fills a shard with the random numbers of a seed: standard normal, rounded to the view's dtype.
/// An element's bits depend only on (seed, operand, global index), on x86-64 and AArch64 with any
/// vector unit. So every rank makes just its own part, and every sharding, number of threads and
/// mixture of CPUs sees the same tensor. `index` gives the global positions held along each of the
/// view's dimensions, the last of which has stride 1. Host tensors of float16, bfloat16, float32 or
/// float64; throws InternalError if view and index do not fit together. `threads` share the work
/// along the second dimension.
void fill_random(const TensorView& view, std::span<const PositionRanges> index,
                 const Extents& global_shape, std::uint64_t seed, Operand operand, int threads = 1);
/// The same for parts of one tensor.
[[nodiscard]] FillPart random_operand(const Extents& global_shape, std::uint64_t seed,
                                      Operand operand, int threads = 1);

}  // namespace annulus::verification
