#pragma once

#include <memory>

#include <annulus/attention/implementation.hpp>

namespace annulus {

/// "native": exact attention on the CPU. A blocked online softmax (Dao 2023, FlashAttention-2,
/// algorithm 1): OpenBLAS multiplies tiles, Highway exponentiates rows. Workspace is a few tiles
/// per thread, whatever the sequence length. Float32 inside for every dtype. The bits of a result
/// depend on the block and the machine, not on the number of threads. Infinities and NaNs reach the
/// rows that see them and no others.
[[nodiscard]] std::unique_ptr<Implementation> make_native_implementation();

}  // namespace annulus
