#pragma once

#include "flash/float32/attention.cuh"
#include "flash/kernels.hpp"

namespace annulus::flash::float32 {

template <int kDims>
__global__ void __launch_bounds__(kThreads, kBlocks<kDims>)
    attend(const __grid_constant__ Arguments arguments, const __grid_constant__ Operands operands) {
  static_assert(sizeof(Shared<kDims>) <= kMaximumShared<kDims>);
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& shared = *reinterpret_cast<Shared<kDims>*>(bytes);
  if (threadIdx.x == 0) {
    describe_item(arguments, static_cast<std::int32_t>(blockIdx.x), shared.item);
  }
  __syncthreads();
  Attention<kDims>(arguments, operands, shared).run();
}

template <int kDims>
KernelInfo info_of() {
  void (*const kernel)(Arguments, Operands) = &attend<kDims>;
  KernelInfo info{reinterpret_cast<const void*>(kernel), kTileRows, kTileRows, kThreads,
                  sizeof(Shared<kDims>)};
  info.persistent = false;
  return info;
}

}  // namespace annulus::flash::float32
