#include <cstdint>
#include <string>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/vectors.cuh>

#include "cudnn/sdpa_rows.hpp"

namespace annulus::cuda {
namespace {

// Elements per access: sixteen bytes of a half type. cuDNN takes only head dimensions that are
// multiples of it.
constexpr int kWidth = 8;
// The LSE of a row without visible keys: its weights, exp of any logit minus this, are 0.
constexpr float kNoWeight = 1e30F;

// The sum, or the maximum, over the lanes that share a vector.
template <class Operation>
__device__ float over_lanes(float value, int lanes, unsigned mask, Operation operation) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    value = operation(value, __shfl_xor_sync(mask, value, distance));
  }
  return value;
}

template <class T>
__global__ void make_rows_kernel(VectorGrid grid, Strided<const T> grad_output,
                                 Strided<const float> lse, Strided<const float> delta,
                                 Strided<T> output, Strided<T> clean_grad_output,
                                 Strided<float> finite_lse) {
  using Values = Pack<T, kWidth>;
  for_each_vector(grid, [&](unsigned b, unsigned t, unsigned n, int lane, unsigned mask) {
    const auto* const gradient = reinterpret_cast<const Values*>(grad_output.at(b, t, n));
    const float natural = *lse.at(b, n, t);
    const bool visible = natural != -INFINITY;
    // Entries are divided by the largest one, so that no square overflows or vanishes.
    float largest = 0;
    for (int pack = lane; pack < grid.packs; pack += grid.lanes) {
      for (const T& value : gradient[pack].at) largest = fmaxf(largest, fabsf(to_float(value)));
    }
    largest = over_lanes(largest, grid.lanes, mask, [](float x, float y) { return fmaxf(x, y); });
    float square = 0;
    for (int pack = lane; pack < grid.packs; pack += grid.lanes) {
      for (const T& value : gradient[pack].at) {
        const float x = to_float(value) / largest;
        square = fmaf(x, x, square);
      }
    }
    square = over_lanes(square, grid.lanes, mask, [](float x, float y) { return x + y; });
    const bool has_output = visible && largest > 0;
    const float factor = has_output ? *delta.at(b, n, t) / largest / square : 0;
    for (int pack = lane; pack < grid.packs; pack += grid.lanes) {
      Values values{}, copied{};
      for (int i = 0; i < kWidth; ++i) {
        const T value = gradient[pack].at[i];
        round_to(has_output ? factor * (to_float(value) / largest) : 0, values.at[i]);
        if (visible) copied.at[i] = value;
      }
      reinterpret_cast<Values*>(output.at(b, t, n))[pack] = values;
      reinterpret_cast<Values*>(clean_grad_output.at(b, t, n))[pack] = copied;
    }
    if (lane == 0) *finite_lse.at(b, n, t) = visible ? natural : kNoWeight;
  });
}

template <class T, int width>
__global__ void add_kernel(VectorGrid grid, Strided<const T> part, const std::int32_t* lengths,
                           Strided<float> sum) {
  for_each_vector(grid, [&](unsigned b, unsigned s, unsigned n, int lane, unsigned /*mask*/) {
    if (lengths != nullptr && s >= static_cast<unsigned>(lengths[b])) return;
    const auto* const from = reinterpret_cast<const Pack<T, width>*>(part.at(b, s, n));
    auto* const to = reinterpret_cast<Pack<float, width>*>(sum.at(b, s, n));
    for (int pack = lane; pack < grid.packs; pack += grid.lanes) {
      const Pack<T, width> more = from[pack];
      Pack<float, width> values = to[pack];
      for (int i = 0; i < width; ++i) values.at[i] += to_float(more.at[i]);
      to[pack] = values;
    }
  });
}

void check(bool fits, const char* what, const ConstTensorView& tensor) {
  if (fits) return;
  throw InternalError(std::string(what) + ": " + std::string(name_of(tensor.dtype())) + " " +
                      to_string(tensor.shape()) + " strides " + to_string(tensor.strides()));
}

}  // namespace

void make_sdpa_rows(const ConstTensorView& grad_output, const ConstTensorView& lse,
                    const ConstTensorView& delta, const SdpaRows& rows, Stream& stream) {
  check(tiled_by(grad_output, kWidth), "rows of cuDNN's backward pass from dO", grad_output);
  const VectorGrid grid = vector_grid(grad_output.shape(), kWidth);
  with_type(grad_output.dtype(), [&](auto type) {
    using T = decltype(type);
    make_rows_kernel<T><<<grid.blocks(), kThreads, 0, CudaStream::of(stream).raw()>>>(
        grid, strided<const T>(grad_output), strided<const float>(lse), strided<const float>(delta),
        strided<T>(rows.output), strided<T>(rows.grad_output), strided<float>(rows.lse));
  });
  check_cuda(cudaGetLastError(), "rows of cuDNN's backward pass");
}

void add_rounded(const ConstTensorView& part, const ConstTensorView& lengths, const TensorView& sum,
                 Stream& stream) {
  check(sum.dtype() == DType::float32 && sum.shape() == part.shape(), "sum of rounded gradients",
        sum);
  const bool tiled = tiled_by(part, kWidth) && tiled_by(sum, kWidth);
  const VectorGrid grid = vector_grid(part.shape(), tiled ? kWidth : 1);
  const auto* const counts =
      lengths.shape().rank() > 0 ? static_cast<const std::int32_t*>(lengths.data()) : nullptr;
  with_type(part.dtype(), [&](auto type) {
    using T = decltype(type);
    const auto kernel = tiled ? add_kernel<T, kWidth> : add_kernel<T, 1>;
    kernel<<<grid.blocks(), kThreads, 0, CudaStream::of(stream).raw()>>>(
        grid, strided<const T>(part), counts, strided<float>(sum));
  });
  check_cuda(cudaGetLastError(), "sum of rounded gradients");
}

}  // namespace annulus::cuda
