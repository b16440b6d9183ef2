#pragma once

#include <type_traits>

#include "flash/consumer.cuh"
#include "flash/producer.cuh"
#include "flash/shape.cuh"
#include "flash/tile_scheduler.cuh"
#include "flash/watch.cuh"

namespace annulus::flash {

/// Attention in the manner of FlashAttention-3 (Shah et al. 2024): one warpgroup loads tiles, the
/// others compute, on as many thread blocks as there are multiprocessors.
template <class Shape, MaskClass kMask, bool kSoftCap>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attend(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = *reinterpret_cast<Shared<Shape>*>(bytes);
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  if (threadIdx.x < 128) {
    hopper::release_registers<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Shape>(arguments, shared);
    if (threadIdx.x == 32) schedule_tiles<Shape>(arguments, shared);
    if (threadIdx.x >= 64) watch<Shape>(arguments, shared);
  } else {
    hopper::take_registers<Shape::kConsumerRegisters>();
    Consumer<Shape, kMask, kSoftCap>(arguments, shared).run();
  }
}

template <class Shape, MaskClass kMask, bool kSoftCap>
KernelInfo info_of() {
  void (*const kernel)(Arguments) = &attend<Shape, kMask, kSoftCap>;
  return {reinterpret_cast<const void*>(kernel), Shape::kRows, Shape::kColumns, Shape::kThreads,
          sizeof(Shared<Shape>)};
}

}  // namespace annulus::flash
