#include <algorithm>
#include <cstddef>
#include <vector>

#include <annulus/core/convert.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/parallel.hpp>
#include <annulus/verification/random_tensor.hpp>

#include "normal_numbers.hpp"

namespace annulus::verification {
namespace {

class Filler {
 public:
  Filler(const TensorView& view, std::span<const PositionRanges> index, const Extents& global_shape,
         std::uint64_t seed, Operand operand)
      : view_(view),
        index_(index),
        global_shape_(global_shape),
        numbers_(seed, operand),
        digits_(~seed, operand) {}

  /// Fills the dimensions from `dim` on, for one index of the dimensions before it. `local` is the
  /// offset in elements of the view, `global` the row-major index in the whole tensor.
  void fill(int dim, std::int64_t local, std::int64_t global) {
    const bool last = dim + 1 == view_.rank();
    std::int64_t i = 0;
    for (const PositionRange& range : index_[static_cast<std::size_t>(dim)].ranges()) {
      // Neighbours in the last dimension are a run of the generator's numbers.
      const std::int64_t run = last && range.stride == 1 ? range.length : 1;
      for (std::int64_t k = 0; k < range.length; k += run, i += run) {
        const std::int64_t position = global * global_shape_[dim] + range.at(k).value();
        const std::int64_t offset = local + i * view_.stride(dim);
        if (last) {
          write(static_cast<std::uint64_t>(position), run, address(offset));
        } else {
          fill(dim + 1, offset, position);
        }
      }
    }
  }

 private:
  void write(std::uint64_t position, std::int64_t run, void* destination) {
    const float* const numbers = numbers_.run(position, run);
    if (view_.dtype() != DType::float64) {
      from_float32(numbers, view_.dtype(), destination, run);
      return;
    }
    // Adds digits that float32 cannot hold, so that a rounding to float32 shows.
    const float* const digits = digits_.run(position, run);
    auto* const wide = static_cast<double*>(destination);
    for (std::int64_t i = 0; i < run; ++i) wide[i] = numbers[i] + 0x1p-25 * digits[i];
  }

  [[nodiscard]] void* address(std::int64_t offset) const {
    return static_cast<std::byte*>(view_.data()) +
           offset * static_cast<std::int64_t>(size_of(view_.dtype()));
  }

  const TensorView& view_;
  std::span<const PositionRanges> index_;
  const Extents& global_shape_;
  NormalNumbers numbers_;
  NormalNumbers digits_;  // of float64
};

}  // namespace

void fill_random(const TensorView& view, std::span<const PositionRanges> index,
                 const Extents& global_shape, std::uint64_t seed, Operand operand, int threads) {
  bool fits = view.rank() > 0 && static_cast<std::size_t>(view.rank()) == index.size() &&
              view.rank() == global_shape.rank();
  for (int dim = 0; fits && dim < view.rank(); ++dim) {
    fits = index[static_cast<std::size_t>(dim)].size() == view.size(dim);
  }
  if (!fits || (view.size(view.rank() - 1) > 1 && view.stride(view.rank() - 1) != 1)) {
    throw InternalError("random numbers for a view of " + to_string(view.shape()) + ", strides " +
                        to_string(view.strides()) + ", of a tensor of " + to_string(global_shape));
  }
  if (view.rank() < 2) {
    Filler(view, index, global_shape, seed, operand).fill(0, 0, 0);
    return;
  }
  const std::int64_t parts = std::clamp<std::int64_t>(view.size(1), 1, std::max(threads, 1));
  parallel_for(parts, static_cast<int>(parts), [&](std::int64_t part, int /*worker*/) {
    const std::int64_t begin = part * view.size(1) / parts;
    const std::int64_t count = (part + 1) * view.size(1) / parts - begin;
    std::vector<PositionRanges> own(index.begin(), index.end());
    own[1] = own[1].slice({LocalPosition(begin), count});
    const TensorView part_view = view.slice(1, begin, count);
    Filler(part_view, own, global_shape, seed, operand).fill(0, 0, 0);
  });
}

FillPart random_operand(const Extents& global_shape, std::uint64_t seed, Operand operand,
                        int threads) {
  return [=](const TensorView& part, std::span<const PositionRanges> index) {
    fill_random(part, index, global_shape, seed, operand, threads);
  };
}

}  // namespace annulus::verification
