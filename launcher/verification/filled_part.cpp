#include <array>
#include <cstddef>

#include <annulus/verification/filled_part.hpp>
#include <annulus/verification/for_tensor.hpp>

namespace annulus::verification {

const char* name_of(Operand operand) {
  constexpr std::array kNames{"query", "key", "value", "bias", "grad output", "grad LSE"};
  return kNames.at(static_cast<std::size_t>(operand));
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
