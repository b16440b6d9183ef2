#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/vectors.cuh>

#include "cuda/maximum_state.hpp"
#include "cuda/state_views.cuh"

namespace annulus::cuda {
namespace {

// [b,n,t].
struct Maximum {
  float* data;
  std::int64_t strides[3];

  __device__ float& at(unsigned b, unsigned n, unsigned t) const {
    return data[b * strides[0] + n * strides[1] + t * strides[2]];
  }
};

Maximum maximum_of(const TensorView& view) {
  return {static_cast<float*>(view.data()), {view.stride(0), view.stride(1), view.stride(2)}};
}

struct MaximumPart {
  Strided<const float> output;
  Lse lse;
  Maximum maximum;
  unsigned first_row, rows, first_head, heads;

  __device__ bool covers(unsigned t, unsigned n) const {
    return t - first_row < rows && n - first_head < heads;  // unsigned: below wraps
  }
  __device__ double lse_at(unsigned b, unsigned t, unsigned n) const {
    return lse.get(b, n - first_head, t - first_row);
  }
  __device__ float maximum_at(unsigned b, unsigned t, unsigned n) const {
    return maximum.at(b, n - first_head, t - first_row);
  }
  __device__ float at(unsigned b, unsigned t, unsigned n, int d) const {
    return output.at(b, t - first_row, n - first_head)[d];
  }
};

struct Arguments {
  MaximumPart parts[kMaximumParts];
  Lse lse;  // of the result, likewise
  Maximum maximum;
  VectorGrid grid;
  int count;
  bool unnormalised;
};

template <class Out>
__global__ void combine_with_maximum_kernel(const __grid_constant__ Arguments a,
                                            Strided<Out> output) {
  for_each_vector(a.grid, [&](unsigned b, unsigned t, unsigned n, int lane, unsigned mask) {
    float high = -INFINITY;
    for (int p = 0; p < a.count; ++p) {
      if (a.parts[p].covers(t, n)) high = fmaxf(high, a.parts[p].maximum_at(b, t, n));
    }
    // Relative to the largest logit, the sum of a part with any weight is finite and, except for
    // its rounding, 1 or more; a NaN stays one.
    double weights[kMaximumParts];
    double total = 0;
    unsigned weighty = 0;  // the parts with an LSE above −∞
    for (int p = 0; p < a.count; ++p) {
      if (!a.parts[p].covers(t, n)) continue;
      const double lse = a.parts[p].lse_at(b, t, n);
      if (lse == -INFINITY) continue;
      weighty |= 1U << p;
      weights[p] = exp(lse - high);
      total += weights[p];
    }
    const double scale = a.unnormalised ? 1.0 : 1.0 / total;
    for (int d = lane; d < a.grid.packs; d += a.grid.lanes) {
      float sum = 0.0F;
      for (int p = 0; p < a.count; ++p) {
        if ((weighty >> p & 1U) != 0) {
          sum = fmaf(static_cast<float>(weights[p] * scale), a.parts[p].at(b, t, n, d), sum);
        } else if (weighty == 0 && a.parts[p].covers(t, n) && isnan(a.parts[p].at(b, t, n, d))) {
          sum = NAN;  // see SoftmaxState
        }
      }
      round_to(sum, output.at(b, t, n)[d]);
    }
    __syncwarp(mask);  // all have read what lane 0 may overwrite in place
    if (lane != 0) return;
    a.maximum.at(b, n, t) = isnan(total) ? NAN : high;
    if (a.unnormalised) {
      a.lse.set(b, n, t, total);
    } else {
      a.lse.set(b, n, t, weighty == 0 ? -INFINITY : high + log(total));
    }
  });
}

void check_maximum(const SoftmaxState& state) {
  check(state.wants_maximum() && state.maximum.dtype() == DType::float32 &&
            state.maximum.shape() == state.lse.shape(),
        state, "combine: a maximum that is missing or does not fit");
}

MaximumPart device_part(const PartialState& part) {
  const TensorView& output = part.state.output;
  return {strided<const float>(output),          lse_of(part.state.lse),
          maximum_of(part.state.maximum),        static_cast<unsigned>(part.first_row),
          static_cast<unsigned>(output.size(1)), static_cast<unsigned>(part.first_head),
          static_cast<unsigned>(output.size(2))};
}

}  // namespace

void combine_with_maximum(std::span<const PartialState> parts, const SoftmaxState& result,
                          Stream& stream, SoftmaxForm form) {
  check_maximum(result);
  Arguments arguments{};
  for (const PartialState& part : parts) {
    check_part(part, result);
    check_maximum(part.state);
    check(part.state.output.dtype() == DType::float32, part.state,
          "combine with a maximum: a part that is rounded");
    arguments.parts[arguments.count++] = device_part(part);
  }
  if (result.lse.elements() == 0) return;
  arguments.lse = lse_of(result.lse);
  arguments.maximum = maximum_of(result.maximum);
  arguments.grid = vector_grid(result.output.shape(), 1);
  arguments.unnormalised = form == SoftmaxForm::unnormalised;
  with_type(result.output.dtype(), [&](auto out) {
    using Out = decltype(out);
    // More is refused by older drivers.
    static_assert(sizeof(Arguments) + sizeof(Strided<Out>) <= 4096);
    combine_with_maximum_kernel<Out>
        <<<arguments.grid.blocks(), kThreads, 0, CudaStream::of(stream).raw()>>>(
            arguments, strided<Out>(result.output));
  });
  check_cuda(cudaGetLastError(), "combining softmax states with maxima");
}

}  // namespace annulus::cuda
