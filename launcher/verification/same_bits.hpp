#pragma once

#include <annulus/core/tensor.hpp>
#include <annulus/partition/named_sharding.hpp>

namespace annulus::verification {

/// True if a rank's part of a tensor, contiguous in host memory, has the same bits as the whole
/// one.
[[nodiscard]] bool is_part_of(const Tensor& part, const NamedSharding& sharding, int rank,
                              const Tensor& whole);

}  // namespace annulus::verification
