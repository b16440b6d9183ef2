#include <algorithm>
#include <array>
#include <type_traits>

#include <annulus/attention/softmax_state_cuda.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/vectors.cuh>

#include "cuda/maximum_state.hpp"
#include "cuda/state_views.cuh"

namespace annulus::cuda {
namespace {

// Elements per access: sixteen bytes of the narrow side.
constexpr int kWidth = 8;

// Rows of batch b from lengths[b] on, or all; `grid` is that of one batch.
template <class T>
__global__ void reset_kernel(const std::int32_t* lengths, Strided<T> output, Lse lse,
                             unsigned batches, VectorGrid grid) {
  const unsigned all_rows = grid.rows;
  for (unsigned b = blockIdx.y; b < batches; b += gridDim.y) {
    const unsigned first = lengths == nullptr ? 0 : static_cast<unsigned>(lengths[b]);
    grid.rows = all_rows - first;
    grid.vectors = grid.rows * grid.heads;
    for_each_vector(grid, [&](unsigned, unsigned t, unsigned n, int lane, unsigned /*mask*/) {
      T* const row = output.at(b, first + t, n);
      for (int d = lane; d < grid.packs; d += grid.lanes) round_to(0.0F, row[d]);
      if (lane == 0) lse.set(b, n, first + t, -INFINITY);
    });
  }
}

void launch_reset(const std::int32_t* lengths, const SoftmaxState& state, Stream& stream) {
  if (state.lse.elements() == 0) return;
  const Extents& shape = state.output.shape();
  const VectorGrid grid = vector_grid({1, shape[1], shape[2], shape[3]}, 1);
  const auto batches = static_cast<unsigned>(shape[0]);
  constexpr unsigned kMaximumBlocksDown = 65535;
  const dim3 blocks(grid.blocks(), std::min(batches, kMaximumBlocksDown));
  with_type(state.output.dtype(), [&](auto type) {
    using T = decltype(type);
    reset_kernel<<<blocks, kThreads, 0, CudaStream::of(stream).raw()>>>(
        lengths, strided<T>(state.output), lse_of(state.lse), batches, grid);
  });
  check_cuda(cudaGetLastError(), "reset of a softmax state");
}

struct Part {
  const void* output;
  std::int64_t strides[3];
  Lse lse;
  unsigned first_row, rows, first_head, heads;
  bool wide;  // float32 output; else of the narrow dtype

  __device__ bool covers(unsigned t, unsigned n) const {
    return t - first_row < rows && n - first_head < heads;  // unsigned: below wraps
  }
  __device__ double lse_at(unsigned b, unsigned t, unsigned n) const {
    return lse.get(b, n - first_head, t - first_row);
  }
  template <class T>
  __device__ const T* at(unsigned b, unsigned t, unsigned n) const {
    return static_cast<const T*>(output) + b * strides[0] + (t - first_row) * strides[1] +
           (n - first_head) * strides[2];
  }
};

template <int most>
struct Parts {
  Part at[most];
  int count;
};

template <class T, int width>
__device__ Pack<T, width> load(const Part& part, unsigned b, unsigned t, unsigned n, int pack) {
  return reinterpret_cast<const Pack<T, width>*>(part.at<T>(b, t, n))[pack];
}

template <class T, int width>
__device__ void add(float (&sum)[width], const Pack<T, width>& values, float weight) {
  for (int i = 0; i < width; ++i) sum[i] = fmaf(weight, to_float(values.at[i]), sum[i]);
}

// For rows of no weight: a part whose row is NaN passes that on; see SoftmaxState.
template <class T, int width>
__device__ void add_nan(float (&sum)[width], const Pack<T, width>& values) {
  for (int i = 0; i < width; ++i) {
    if (isnan(to_float(values.at[i]))) sum[i] = NAN;
  }
}

// Parts that are all of type Narrow and few are loaded at once, to keep the memory busy; `most` is
// small then. Otherwise one after the other.
template <class Narrow, class Out, int width, int most, bool uniform>
__global__ void combine_kernel(const __grid_constant__ Parts<most> parts, Strided<Out> output,
                               Lse lse, VectorGrid grid) {
  constexpr int kUnroll = uniform ? most : 1;
  for_each_vector(grid, [&](unsigned b, unsigned t, unsigned n, int lane, unsigned mask) {
    double own[most];  // −∞ for a part that has nothing here
    double high = -INFINITY;
    unsigned weighty = 0;  // the parts with an LSE above −∞
    int last = 0;
#pragma unroll kUnroll
    for (int p = 0; p < most; ++p) {
      if (p >= parts.count) break;
      own[p] = parts.at[p].covers(t, n) ? parts.at[p].lse_at(b, t, n) : -INFINITY;
      if (own[p] == -INFINITY) continue;
      // exp of the distance to the largest never overflows; a NaN stays one in its weight.
      high = fmax(high, own[p]);
      weighty |= 1U << p;
      last = p;
    }
    float weights[most];
    double total = 0;
#pragma unroll kUnroll
    for (int p = 0; p < most; ++p) {
      weights[p] = 0.0F;
      if ((weighty >> p & 1U) == 0) continue;
      const double weight = lse.wide ? exp(own[p] - high) : expf(static_cast<float>(own[p] - high));
      weights[p] = static_cast<float>(weight);
      total += weight;
    }
    const float scale = weighty == 0 ? 0.0F : static_cast<float>(1.0 / total);
    Out* const row = output.at(b, t, n);
    const Part& alone = parts.at[last];
    const void* const its_row = alone.wide ? static_cast<const void*>(alone.at<float>(b, t, n))
                                           : static_cast<const void*>(alone.at<Narrow>(b, t, n));
    const bool in_place = weighty == 1U << last && its_row == row;
    for (int d = lane; d < grid.packs && !in_place; d += grid.lanes) {
      float sum[width] = {};
      if constexpr (uniform) {
        Pack<Narrow, width> values[most];
#pragma unroll
        for (int p = 0; p < most; ++p) {
          if ((weighty >> p & 1U) != 0) values[p] = load<Narrow, width>(parts.at[p], b, t, n, d);
        }
#pragma unroll
        for (int p = 0; p < most; ++p) {
          if ((weighty >> p & 1U) != 0) add(sum, values[p], weights[p] * scale);
        }
      } else {
        for (int p = 0; p < parts.count; ++p) {
          const Part& part = parts.at[p];
          if ((weighty >> p & 1U) == 0) continue;
          if (part.wide) {
            add(sum, load<float, width>(part, b, t, n, d), weights[p] * scale);
          } else {
            add(sum, load<Narrow, width>(part, b, t, n, d), weights[p] * scale);
          }
        }
      }
      for (int p = 0; p < parts.count && weighty == 0; ++p) {
        const Part& part = parts.at[p];
        if (!part.covers(t, n)) continue;
        if (part.wide) {
          add_nan(sum, load<float, width>(part, b, t, n, d));
        } else {
          add_nan(sum, load<Narrow, width>(part, b, t, n, d));
        }
      }
      Pack<Out, width> rounded;
      for (int i = 0; i < width; ++i) round_to(sum[i], rounded.at[i]);
      reinterpret_cast<Pack<Out, width>*>(row)[d] = rounded;
    }
    __syncwarp(mask);  // all have read the LSE that lane 0 may overwrite in place
    if (lane == 0) {
      lse.set(b, n, t,
              weighty == 0 ? -INFINITY
                           : high + (lse.wide ? log(total) : logf(static_cast<float>(total))));
    }
  });
}

// The tiles of combine_few: every block takes some rows and kHeadsPerBlock heads.
constexpr int kFew = 4;
constexpr unsigned kHeadsPerBlock = 8;
constexpr unsigned kHeadsAtOnce = 2;

struct FewShape {
  unsigned rows, heads;
  unsigned packs;  // of a vector
  unsigned lanes;  // that share a vector: a power of two, at least `packs`
};

// The common case: few parts, all of one half type, with float32 LSEs. It is bound by memory: what
// a thread needs for two vectors is on its way before it waits for any of it. That takes loads
// without conditions, so a part that does not cover a row reads something else and weighs nothing.
template <class Narrow, class Out, int count>
__global__ void combine_few_kernel(const __grid_constant__ Parts<kFew> parts, Strided<Out> output,
                                   Lse lse, FewShape shape) {
  const unsigned group = threadIdx.x / shape.lanes;
  const unsigned lane = threadIdx.x % shape.lanes;
  const unsigned rows_per_block = blockDim.x / shape.lanes / kHeadsAtOnce;
  const unsigned b = blockIdx.z;
  const unsigned t = blockIdx.x * rows_per_block + group / kHeadsAtOnce;
  if (t >= shape.rows) return;
  const unsigned first_head = blockIdx.y * kHeadsPerBlock + group % kHeadsAtOnce;
  const bool holds = lane < shape.packs;
  const unsigned pack = holds ? lane : 0;
  const unsigned mask = (shape.lanes == kWarp ? ~0U : (1U << shape.lanes) - 1U)
                        << (threadIdx.x % kWarp / shape.lanes * shape.lanes);
  for (unsigned i = 0; i < kHeadsPerBlock; i += 2 * kHeadsAtOnce) {
    uint4 values[2][count];
    float own[2][count];
    bool covers[2][count];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned wanted = first_head + i + static_cast<unsigned>(h) * kHeadsAtOnce;
      const unsigned n = wanted < shape.heads ? wanted : 0;
#pragma unroll
      for (int p = 0; p < count; ++p) {
        const Part& part = parts.at[p];
        covers[h][p] = part.covers(t, n);
        const void* const row = covers[h][p] ? static_cast<const void*>(part.at<Narrow>(b, t, n))
                                             : static_cast<const void*>(output.at(b, t, n));
        const float* const at = covers[h][p]
                                    ? static_cast<const float*>(part.lse.data) +
                                          part.lse.at(b, n - part.first_head, t - part.first_row)
                                    : static_cast<const float*>(lse.data) + lse.at(b, n, t);
        values[h][p] = static_cast<const uint4*>(row)[pack];
        own[h][p] = *at;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned n = first_head + i + static_cast<unsigned>(h) * kHeadsAtOnce;
      if (n >= shape.heads) continue;
      float high = -INFINITY;
      bool any = false;
#pragma unroll
      for (int p = 0; p < count; ++p) {
        if (!covers[h][p]) own[h][p] = -INFINITY;
        any = any || own[h][p] != -INFINITY;
        high = fmaxf(high, own[h][p]);
      }
      float weights[count];
      float total = 0.0F;
#pragma unroll
      for (int p = 0; p < count; ++p) {
        weights[p] = own[h][p] == -INFINITY ? 0.0F : expf(own[h][p] - high);
        total += weights[p];
      }
      const float scale = any ? 1.0F / total : 0.0F;
      if (holds) {
        float sum[kWidth] = {};
#pragma unroll
        for (int p = 0; p < count; ++p) {
          const auto* const narrow = reinterpret_cast<const Narrow*>(&values[h][p]);
          if (!any && covers[h][p]) {
            add_nan(sum, *reinterpret_cast<const Pack<Narrow, kWidth>*>(narrow));
          }
          if (own[h][p] == -INFINITY) continue;
          for (int k = 0; k < kWidth; ++k) {
            sum[k] = fmaf(weights[p] * scale, to_float(narrow[k]), sum[k]);
          }
        }
        Pack<Out, kWidth> rounded;
        for (int k = 0; k < kWidth; ++k) round_to(sum[k], rounded.at[k]);
        reinterpret_cast<Pack<Out, kWidth>*>(output.at(b, t, n))[lane] = rounded;
      }
      __syncwarp(mask);  // all have read the LSE that lane 0 may overwrite in place
      if (lane == 0) {
        static_cast<float*>(lse.data)[lse.at(b, n, t)] = any ? high + logf(total) : -INFINITY;
      }
    }
  }
}

Part device_part(const PartialState& part) {
  const TensorView& output = part.state.output;
  return {output.data(),
          {output.stride(0), output.stride(1), output.stride(2)},
          lse_of(part.state.lse),
          static_cast<unsigned>(part.first_row),
          static_cast<unsigned>(output.size(1)),
          static_cast<unsigned>(part.first_head),
          static_cast<unsigned>(output.size(2)),
          output.dtype() == DType::float32};
}

template <class Narrow, class Out, int most, bool uniform>
void launch_combine(std::span<const PartialState> parts, const SoftmaxState& result, bool tiled,
                    cudaStream_t stream) {
  Parts<most> arguments{};
  for (const PartialState& part : parts) arguments.at[arguments.count++] = device_part(part);
  const VectorGrid grid = vector_grid(result.output.shape(), tiled ? kWidth : 1);
  const auto kernel = tiled ? combine_kernel<Narrow, Out, kWidth, most, uniform>
                            : combine_kernel<Narrow, Out, 1, most, uniform>;
  kernel<<<grid.blocks(), kThreads, 0, stream>>>(arguments, strided<Out>(result.output),
                                                 lse_of(result.lse), grid);
}

// True if combine_few_kernel can do it.
bool is_common(std::span<const PartialState> parts, const SoftmaxState& result, bool tiled,
               bool uniform) {
  const auto plain = [](const SoftmaxState& state) { return state.lse.dtype() == DType::float32; };
  return tiled && uniform && !parts.empty() && result.output.size(3) / kWidth <= kWarp &&
         plain(result) && result.output.size(0) < 65536 && result.output.size(2) < 65536 &&
         std::all_of(parts.begin(), parts.end(),
                     [&](const PartialState& part) { return plain(part.state); });
}

template <class Narrow, class Out>
void launch_combine_few(std::span<const PartialState> parts, const SoftmaxState& result,
                        cudaStream_t stream) {
  Parts<kFew> arguments{};
  for (const PartialState& part : parts) arguments.at[arguments.count++] = device_part(part);
  const Extents& whole = result.output.shape();
  FewShape shape{static_cast<unsigned>(whole[1]), static_cast<unsigned>(whole[2]),
                 static_cast<unsigned>(whole[3] / kWidth), 1};
  while (shape.lanes < shape.packs) shape.lanes *= 2;
  const unsigned rows_per_block = kThreads / shape.lanes / kHeadsAtOnce;
  const dim3 blocks((shape.rows + rows_per_block - 1) / rows_per_block,
                    (shape.heads + kHeadsPerBlock - 1) / kHeadsPerBlock,
                    static_cast<unsigned>(whole[0]));
  constexpr auto kKernels =
      std::array{combine_few_kernel<Narrow, Out, 1>, combine_few_kernel<Narrow, Out, 2>,
                 combine_few_kernel<Narrow, Out, 3>, combine_few_kernel<Narrow, Out, kFew>};
  kKernels[parts.size() - 1]<<<blocks, kThreads, 0, stream>>>(
      arguments, strided<Out>(result.output), lse_of(result.lse), shape);
}

// The one dtype besides float32 that occurs; float32 if none does.
DType narrow_dtype(std::span<const PartialState> parts, const SoftmaxState& result) {
  DType narrow = result.output.dtype();
  for (const PartialState& part : parts) {
    const DType dtype = part.state.output.dtype();
    if (dtype == DType::float32) continue;
    check(narrow == DType::float32 || narrow == dtype, part.state, "combine of other dtypes");
    narrow = dtype;
  }
  return narrow;
}

}  // namespace

void reset(const SoftmaxState& state, Stream& stream) {
  check_state(state, "reset");
  launch_reset(nullptr, state, stream);
}

void reset_beyond(const ConstTensorView& lengths, const SoftmaxState& state, Stream& stream) {
  check_state(state, "reset of the rows beyond lengths");
  check(lengths.dtype() == DType::int32 && lengths.shape() == Extents{state.output.size(0)}, state,
        "reset of the rows beyond other lengths");
  launch_reset(static_cast<const std::int32_t*>(lengths.data()), state, stream);
}

void combine(std::span<const PartialState> parts, const SoftmaxState& result, Stream& stream,
             SoftmaxForm form) {
  check_state(result, "combine");
  check(parts.size() <= kMaximumParts, result, "combine of too many parts");
  if (result.wants_maximum()) return combine_with_maximum(parts, result, stream, form);
  check(form == SoftmaxForm::normalised, result, "combine without a maximum");
  bool tiled = tiled_by(result.output, kWidth);
  bool uniform = parts.size() <= kFew;
  const DType narrow = narrow_dtype(parts, result);
  for (const PartialState& part : parts) {
    check_part(part, result);
    tiled = tiled && tiled_by(part.state.output, kWidth);
    uniform = uniform && part.state.output.dtype() == narrow;
  }
  if (result.lse.elements() == 0) return;
  const cudaStream_t raw = CudaStream::of(stream).raw();
  with_type(narrow, [&](auto type) {
    using Narrow = decltype(type);
    with_type(result.output.dtype(), [&](auto out) {
      using Out = decltype(out);
      // Any other pair has no narrow part, or was refused.
      if constexpr (std::is_same_v<Out, Narrow> || std::is_same_v<Out, float>) {
        if constexpr (sizeof(Narrow) * kWidth == sizeof(uint4)) {
          if (is_common(parts, result, tiled, uniform)) {
            return launch_combine_few<Narrow, Out>(parts, result, raw);
          }
        }
        if (uniform) {
          launch_combine<Narrow, Out, kFew, true>(parts, result, tiled, raw);
        } else {
          launch_combine<Narrow, Out, kMaximumParts, false>(parts, result, tiled, raw);
        }
      }
    });
  });
  check_cuda(cudaGetLastError(), "combining softmax states");
}

}  // namespace annulus::cuda
