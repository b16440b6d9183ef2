#include <annulus/attention/softmax_state_cuda.hpp>
#include <annulus/core/cuda_stream.hpp>

#include "cuda/vectors.cuh"

namespace annulus::cuda {
namespace {

// Elements per access: sixteen bytes of the narrow side.
constexpr int kWidth = 8;

void check(bool fits, const SoftmaxState& state, const char* what) {
  if (fits) return;
  throw InternalError(std::string(what) + ": output " + to_string(state.output.shape()) +
                      " strides " + to_string(state.output.strides()) + " with LSE " +
                      std::string(name_of(state.lse.dtype())) + " " + to_string(state.lse.shape()));
}

void check_state(const SoftmaxState& state, bool narrow_allowed, const char* what) {
  const TensorView& output = state.output;
  check(output.rank() == 4 && (output.size(3) <= 1 || output.stride(3) == 1), state, what);
  check(state.lse.dtype() == DType::float32 &&
            state.lse.shape() == Extents{output.size(0), output.size(2), output.size(1)},
        state, what);
  check(narrow_allowed || output.dtype() == DType::float32, state, what);
}

void check_same_shape(const SoftmaxState& state, const Extents& shape, const char* what) {
  check(state.output.shape() == shape, state, what);
}

template <class T>
__global__ void reset_kernel(Strided<T> output, Strided<float> lse, VectorGrid grid) {
  for_each_vector(grid, [&](unsigned b, unsigned t, unsigned n, int lane, unsigned /*mask*/) {
    T* const row = output.at(b, t, n);
    for (int d = lane; d < grid.packs; d += grid.lanes) round_to(0.0F, row[d]);
    if (lane == 0) *lse.at(b, n, t) = -INFINITY;
  });
}

template <class T, int width>
__global__ void merge_kernel(Strided<float> output, Strided<float> lse, Strided<const T> other,
                             Strided<const float> other_lse, VectorGrid grid) {
  using Wide = Pack<float, width>;
  using Narrow = Pack<T, width>;
  for_each_vector(grid, [&](unsigned b, unsigned t, unsigned n, int lane, unsigned mask) {
    float& here = *lse.at(b, n, t);
    const float a = here;
    const float c = *other_lse.at(b, n, t);
    __syncwarp(mask);  // all have read the LSE that lane 0 is going to overwrite
    if (c == -INFINITY) return;
    // The weights exp(lᵢ − l) follow from the difference of the LSEs alone.
    const bool empty = a == -INFINITY;
    const float ratio = empty ? 0.0F : expf(-fabsf(a - c));
    const float smaller = ratio / (1.0F + ratio);
    const float weight = c > a ? 1.0F - smaller : smaller;  // of the other; 0.5 when equal
    auto* const row = reinterpret_cast<Wide*>(output.at(b, t, n));
    const auto* const other_row = reinterpret_cast<const Narrow*>(other.at(b, t, n));
    for (int d = lane; d < grid.packs; d += grid.lanes) {
      const Narrow added = other_row[d];
      Wide sum;
      if (empty) {
        // What an empty row holds does not matter.
        for (int i = 0; i < width; ++i) sum.at[i] = to_float(added.at[i]);
      } else {
        sum = row[d];
        for (int i = 0; i < width; ++i) {
          sum.at[i] = fmaf(weight, to_float(added.at[i]) - sum.at[i], sum.at[i]);
        }
      }
      row[d] = sum;
    }
    if (lane == 0) here = empty ? c : fmaxf(a, c) + log1pf(ratio);
  });
}

// The LSE goes along unless it is null.
struct LsePair {
  Strided<const float> from{};
  Strided<float> to{};
};

template <class From, class To, int width>
__global__ void convert_kernel(Strided<const From> from, Strided<To> to, LsePair lse,
                               VectorGrid grid) {
  for_each_vector(grid, [&](unsigned b, unsigned t, unsigned n, int lane, unsigned /*mask*/) {
    const auto* const source = reinterpret_cast<const Pack<From, width>*>(from.at(b, t, n));
    auto* const target = reinterpret_cast<Pack<To, width>*>(to.at(b, t, n));
    for (int d = lane; d < grid.packs; d += grid.lanes) {
      const Pack<From, width> values = source[d];
      Pack<To, width> converted;
      for (int i = 0; i < width; ++i) round_to(to_float(values.at[i]), converted.at[i]);
      target[d] = converted;
    }
    if (lse.to.data != nullptr && lane == 0) *lse.to.at(b, n, t) = *lse.from.at(b, n, t);
  });
}

template <class From, class To>
void launch_convert(const ConstTensorView& from, const TensorView& to, const LsePair& lse,
                    cudaStream_t stream) {
  const bool tiled = tiled_by(from, kWidth) && tiled_by(to, kWidth);
  const VectorGrid grid = vector_grid(to.shape(), tiled ? kWidth : 1);
  const auto kernel = tiled ? convert_kernel<From, To, kWidth> : convert_kernel<From, To, 1>;
  kernel<<<grid.blocks(), kThreads, 0, stream>>>(strided<const From>(from), strided<To>(to), lse,
                                                 grid);
}

}  // namespace

void reset(const SoftmaxState& state, Stream& stream) {
  check_state(state, true, "reset");
  if (state.lse.elements() == 0) return;
  const VectorGrid grid = vector_grid(state.output.shape(), 1);
  with_type(state.output.dtype(), [&](auto type) {
    using T = decltype(type);
    reset_kernel<<<grid.blocks(), kThreads, 0, CudaStream::of(stream).raw()>>>(
        strided<T>(state.output), strided<float>(state.lse), grid);
  });
  check_cuda(cudaGetLastError(), "reset of a softmax state");
}

void merge(const SoftmaxState& state, const SoftmaxState& partial, Stream& stream) {
  check_state(state, false, "merge");
  check_state(partial, true, "merge");
  check_same_shape(partial, state.output.shape(), "merge");
  if (state.lse.elements() == 0) return;
  const cudaStream_t raw = CudaStream::of(stream).raw();
  const bool tiled = tiled_by(state.output, kWidth) && tiled_by(partial.output, kWidth);
  const VectorGrid grid = vector_grid(state.output.shape(), tiled ? kWidth : 1);
  with_type(partial.output.dtype(), [&](auto type) {
    using T = decltype(type);
    const auto kernel = tiled ? merge_kernel<T, kWidth> : merge_kernel<T, 1>;
    kernel<<<grid.blocks(), kThreads, 0, raw>>>(
        strided<float>(state.output), strided<float>(state.lse), strided<const T>(partial.output),
        strided<const float>(partial.lse), grid);
  });
  check_cuda(cudaGetLastError(), "merge of softmax states");
}

void widen(const SoftmaxState& narrow, const SoftmaxState& result, Stream& stream) {
  check_state(narrow, true, "widen");
  check_state(result, false, "widen");
  check_same_shape(narrow, result.output.shape(), "widen");
  if (result.lse.elements() == 0) return;
  const cudaStream_t raw = CudaStream::of(stream).raw();
  with_type(narrow.output.dtype(), [&](auto type) {
    launch_convert<decltype(type), float>(
        narrow.output, result.output,
        {strided<const float>(narrow.lse), strided<float>(result.lse)}, raw);
  });
  check_cuda(cudaGetLastError(), "widening a softmax state");
}

void round_output(const SoftmaxState& state, const TensorView& output, Stream& stream) {
  check_state(state, false, "rounding");
  check_same_shape(state, output.shape(), "rounding");
  if (state.lse.elements() == 0) return;
  const cudaStream_t raw = CudaStream::of(stream).raw();
  with_type(output.dtype(), [&](auto type) {
    launch_convert<float, decltype(type)>(state.output, output, {}, raw);
  });
  check_cuda(cudaGetLastError(), "rounding the output");
}

}  // namespace annulus::cuda
