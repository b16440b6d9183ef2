#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

#include "flash/arguments.hpp"

namespace annulus::flash {

/// The work of a kernel for each pair.
enum class MaskClass : std::uint8_t {
  position,  ///< in masked tiles, tests its position: causal, window, lengths, documents
  ids,       ///< in masked tiles, also tests whether row and column have the same id
  general,   ///< in all tiles, adds a bias, tests a dense mask and draws dropout, as the call asks
};

/// A compiled kernel, and how it is launched.
struct KernelInfo {
  const void* function = nullptr;
  int tile_rows = 0;
  int tile_columns = 0;
  int threads = 0;
  std::size_t shared_bytes = 0;
  /// As many thread blocks as multiprocessors, which take items in turn; else a block for each.
  bool persistent = true;
};

/// For head dimensions up to kHeadDim and kValueDim. Both half types of each are compiled together,
/// from kernel.cu.in.
/// The general class tests for a soft cap at run time.
template <int kHeadDim, int kValueDim, bool kHalf, MaskClass kMask, bool kSoftCap>
[[nodiscard]] KernelInfo kernel_info();

/// For float32 tensors with head dimensions up to kDims, each compiled by itself. It takes
/// Arguments and Operands; others take Arguments alone.
template <int kDims>
[[nodiscard]] KernelInfo float32_kernel_info();

/// Enqueues repair(), which computes what attend() left out of a call with these arguments.
[[nodiscard]] cudaError_t launch_repair(const Arguments& arguments, const Operands& tensors,
                                        bool half, int blocks, cudaStream_t stream);

}  // namespace annulus::flash
