#include <annulus/attention/softmax_state_cuda.hpp>
#include <annulus/core/cuda_stream.hpp>

#include "cuda/vectors.cuh"

namespace annulus::cuda {
namespace {

// One unit of a copy, of 1, 2, 4, 8 or 16 bytes.
template <int bytes>
struct alignas(bytes) Unit {
  unsigned char at[bytes];
};

template <int bytes>
__global__ void copy_kernel(Strided<const Unit<bytes>> from, std::int64_t from_step,
                            Strided<Unit<bytes>> to, std::int64_t to_step, VectorGrid grid) {
  for_each_vector(grid, [&](unsigned i, unsigned j, unsigned k, int lane, unsigned /*mask*/) {
    const Unit<bytes>* const source = from.at(i, j, k);
    Unit<bytes>* const target = to.at(i, j, k);
    for (std::int64_t d = lane; d < grid.packs; d += grid.lanes) {
      target[d * to_step] = source[d * from_step];
    }
  });
}

// The same view with ones in front of its dimensions, up to four.
template <class View>
View with_four_dimensions(const View& view) {
  Extents shape{1, 1, 1, 1};
  Extents strides{0, 0, 0, 1};
  for (int dim = 0; dim < view.rank(); ++dim) {
    shape[4 - view.rank() + dim] = view.size(dim);
    strides[4 - view.rank() + dim] = view.stride(dim);
  }
  return {view.data(), view.dtype(), shape, strides, view.place()};
}

template <int bytes, class View>
auto in_units(const View& view, int width) {
  using Byte = Unit<bytes>;
  using Pointer = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view.data())>>,
                                     const Byte, Byte>;
  auto units = strided<Pointer>(view);
  for (std::int64_t& stride : units.strides) stride /= width;
  return units;
}

template <int bytes>
void launch(const ConstTensorView& from, const TensorView& to, int width, cudaStream_t stream) {
  const VectorGrid grid = vector_grid(to.shape(), width);
  // Units of several elements are neighbours.
  const std::int64_t from_step = width > 1 ? 1 : from.stride(3);
  const std::int64_t to_step = width > 1 ? 1 : to.stride(3);
  copy_kernel<bytes><<<grid.blocks(), kThreads, 0, stream>>>(
      in_units<bytes>(from, width), from_step, in_units<bytes>(to, width), to_step, grid);
}

}  // namespace

void copy(const ConstTensorView& source, const TensorView& destination, Stream& stream) {
  if (!(source.shape() == destination.shape()) || source.dtype() != destination.dtype() ||
      source.rank() > 4) {
    throw InternalError(
        "copy of " + std::string(name_of(source.dtype())) + " " + to_string(source.shape()) +
        " to " + std::string(name_of(destination.dtype())) + " " + to_string(destination.shape()));
  }
  if (destination.elements() == 0) return;
  const cudaStream_t raw = CudaStream::of(stream).raw();
  const ConstTensorView from = with_four_dimensions(source);
  const TensorView to = with_four_dimensions(destination);
  const int element = static_cast<int>(size_of(from.dtype()));
  const bool together =
      (from.size(3) == 1 || from.stride(3) == 1) && (to.size(3) == 1 || to.stride(3) == 1);
  const int width = 16 / element;
  if (together && width > 1 && tiled_by(from, width) && tiled_by(to, width)) {
    launch<16>(from, to, width, raw);
  } else if (element == 1) {
    launch<1>(from, to, 1, raw);
  } else if (element == 2) {
    launch<2>(from, to, 1, raw);
  } else if (element == 4) {
    launch<4>(from, to, 1, raw);
  } else {
    launch<8>(from, to, 1, raw);
  }
  check_cuda(cudaGetLastError(), "copy on the device");
}

}  // namespace annulus::cuda
