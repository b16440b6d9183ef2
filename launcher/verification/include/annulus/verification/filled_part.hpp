#pragma once

#include <cstdint>
#include <vector>

#include <annulus/core/memory.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/ring/sharded_operands.hpp>
#include <annulus/verification/operand_fills.hpp>
#include <annulus/verification/random_tensor.hpp>

namespace annulus::verification {

[[nodiscard]] const char* name_of(Operand operand);

/// A tensor's entries at `index`, positions along each of its four dimensions. If memory lacks, the
/// error names the tensor.
[[nodiscard]] Tensor filled_part(const char* name, const std::vector<PositionRanges>& index,
                                 DType dtype, const FillPart& fill, MemoryPool& memory);

/// A rank's part of random gradients of the output, and of the LSE, as [b,n,t,1].
[[nodiscard]] Tensor random_grad_output(const ring::ShardedOperands& operands, DType dtype,
                                        std::uint64_t seed, int rank, MemoryPool& memory,
                                        int threads = 1);
[[nodiscard]] Tensor random_grad_lse(const ring::ShardedOperands& operands, std::uint64_t seed,
                                     int rank, MemoryPool& memory, int threads = 1);

}  // namespace annulus::verification
