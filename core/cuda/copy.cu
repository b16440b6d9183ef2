#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/vectors.cuh>

#include "cuda/copy.hpp"

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

// Views of equal shape and dtype, of up to four dimensions.
void copy_at_once(const ConstTensorView& source, const TensorView& destination,
                  cudaStream_t stream) {
  const ConstTensorView from = with_four_dimensions(source);
  const TensorView to = with_four_dimensions(destination);
  const int element = static_cast<int>(size_of(from.dtype()));
  const bool together =
      (from.size(3) == 1 || from.stride(3) == 1) && (to.size(3) == 1 || to.stride(3) == 1);
  const int width = 16 / element;
  if (together && width > 1 && tiled_by(from, width) && tiled_by(to, width)) {
    launch<16>(from, to, width, stream);
  } else if (element == 1) {
    launch<1>(from, to, 1, stream);
  } else if (element == 2) {
    launch<2>(from, to, 1, stream);
  } else if (element == 4) {
    launch<4>(from, to, 1, stream);
  } else {
    launch<8>(from, to, 1, stream);
  }
  check_cuda(cudaGetLastError(), "copy on the device");
}

// Entry `index` of the first dimension.
template <class View>
View entry(const View& view, std::int64_t index) {
  const View one = view.slice(0, index, 1);
  const auto rest = [&](const Extents& all) {
    return Extents(std::span(all.begin() + 1, all.end()));
  };
  return View(one.data(), view.dtype(), rest(view.shape()), rest(view.strides()), view.place());
}

}  // namespace

void copy(const ConstTensorView& source, const TensorView& destination, Stream& stream) {
  if (destination.elements() == 0) return;
  if (destination.rank() <= 4) {
    copy_at_once(source, destination, CudaStream::of(stream).raw());
    return;
  }
  for (std::int64_t i = 0; i < destination.size(0); ++i) {
    copy(entry(source, i), entry(destination, i), stream);
  }
}

}  // namespace annulus::cuda
