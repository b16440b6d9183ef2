#include "filled_part.hpp"

#include <cstddef>

#include <annulus/core/error.hpp>
#include <annulus/verification/for_tensor.hpp>
#include <annulus/verification/random_scores.hpp>

namespace annulus::verification {

const char* name_of(Operand operand) {
  switch (operand) {
    case Operand::query:
      return "query";
    case Operand::key:
      return "key";
    case Operand::value:
      return "value";
    case Operand::bias:
      return "bias";
    case Operand::grad_output:
      return "grad output";
    case Operand::grad_lse:
      return "grad LSE";
  }
  throw InternalError("an operand without a name");
}

Tensor filled_part(const char* name, const std::vector<PositionRanges>& index, DType dtype,
                   const FillPart& fill, MemoryPool& memory) {
  Extents shape{0, 0, 0, 0};
  for (int dim = 0; dim < 4; ++dim) shape[dim] = index[static_cast<std::size_t>(dim)].size();
  return for_tensor(name, [&] {
    Tensor part(dtype, shape, memory);
    fill(part.view(), index);
    return part;
  });
}

FillPart operand_fill(const FillPart& given, const Extents& global_shape, std::uint64_t seed,
                      Operand operand, int threads) {
  return given ? given : random_operand(global_shape, seed, operand, threads);
}

FillPart bias_fill(const OperandFills& fills, const Extents& global_shape, std::uint64_t seed,
                   int threads) {
  return fills.bias ? fills.bias : random_bias(global_shape, 1, seed, threads);
}

FillPart mask_fill(const OperandFills& fills, const Extents& global_shape, std::uint64_t seed) {
  return fills.mask ? fills.mask : random_mask(global_shape, 0.75, seed);
}

Tensor random_grad_output(const ring::ShardedOperands& operands, DType dtype, std::uint64_t seed,
                          int rank, MemoryPool& memory, int threads) {
  const Extents& whole = operands.output.global_shape();
  return filled_part(name_of(Operand::grad_output), operands.output.index(rank), dtype,
                     random_operand(whole, seed, Operand::grad_output, threads), memory);
}

Tensor random_grad_lse(const ring::ShardedOperands& operands, std::uint64_t seed, int rank,
                       MemoryPool& memory, int threads) {
  std::vector<PositionRanges> index = operands.lse.index(rank);
  index.push_back(PositionRanges::all(1));
  const Extents& rows = operands.lse.global_shape();
  const Extents whole{rows[0], rows[1], rows[2], 1};
  return filled_part(name_of(Operand::grad_lse), index, DType::float32,
                     random_operand(whole, seed, Operand::grad_lse, threads), memory);
}

}  // namespace annulus::verification
