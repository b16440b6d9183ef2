#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <thread>
#include <vector>

#include <annulus/attention/philox.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/core/error.hpp>
#include <annulus/launcher/random_tensor.hpp>

namespace annulus::launcher {
namespace {

// Keeps these counters apart from other uses of the same seed.
constexpr std::uint32_t kTensorStream = 0x74656e73;

// Standard normal numbers by index: four to a counter, by the transform of Box & Muller (1958).
class NormalNumbers {
 public:
  NormalNumbers(std::uint64_t seed, Operand operand)
      : key_(philox_key(seed)), operand_(static_cast<std::uint32_t>(operand)) {}

  float operator[](std::uint64_t index) {
    const std::uint64_t block = index / 4;
    if (block != block_) {
      compute(block);
      block_ = block;
    }
    return numbers_[index % 4];
  }

 private:
  void compute(std::uint64_t block) {
    const PhiloxCounter words =
        philox({static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32U),
                operand_, kTensorStream},
               key_);
    for (std::size_t pair = 0; pair < 4; pair += 2) {
      constexpr double kUnit = 0x1p-32;
      const double radius = std::sqrt(-2 * std::log((words[pair] + 0.5) * kUnit));
      const double angle = 2 * std::numbers::pi * kUnit * words[pair + 1];
      numbers_[pair] = static_cast<float>(radius * std::cos(angle));
      numbers_[pair + 1] = static_cast<float>(radius * std::sin(angle));
    }
  }

  PhiloxKey key_;
  std::uint32_t operand_;
  std::uint64_t block_ = ~std::uint64_t{0};
  std::array<float, 4> numbers_{};
};

class Filler {
 public:
  Filler(const TensorView& view, std::span<const PositionRanges> index, const Extents& global_shape,
         NormalNumbers numbers)
      : view_(view),
        index_(index),
        global_shape_(global_shape),
        numbers_(numbers),
        row_(static_cast<std::size_t>(view.size(view.rank() - 1))) {}

  /// Fills what lies under one index of the dimensions before `dim`: `local` is its offset in
  /// elements of the view, `global` its row-major index in the whole tensor.
  void fill(int dim, std::int64_t local, std::int64_t global) {
    const bool last = dim + 1 == view_.rank();
    std::int64_t i = 0;
    for (const PositionRange& range : index_[static_cast<std::size_t>(dim)].ranges()) {
      for (std::int64_t k = 0; k < range.length; ++k, ++i) {
        const std::int64_t position = global * global_shape_[dim] + range.at(k).value();
        if (last) {
          row_[static_cast<std::size_t>(i)] = numbers_[static_cast<std::uint64_t>(position)];
        } else {
          fill(dim + 1, local + i * view_.stride(dim), position);
        }
      }
    }
    if (last && i > 0) {
      auto* bytes = static_cast<std::byte*>(view_.data());
      from_float32(row_.data(), view_.dtype(),
                   bytes + local * static_cast<std::int64_t>(size_of(view_.dtype())), i);
    }
  }

 private:
  const TensorView& view_;
  std::span<const PositionRanges> index_;
  const Extents& global_shape_;
  NormalNumbers numbers_;
  std::vector<float> row_;
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
    Filler(view, index, global_shape, NormalNumbers(seed, operand)).fill(0, 0, 0);
    return;
  }
  const std::int64_t parts = std::clamp<std::int64_t>(view.size(1), 1, std::max(threads, 1));
  const auto fill_part = [&](std::int64_t part) {
    const std::int64_t begin = part * view.size(1) / parts;
    const std::int64_t count = (part + 1) * view.size(1) / parts - begin;
    std::vector<PositionRanges> own(index.begin(), index.end());
    own[1] = own[1].slice({LocalPosition(begin), count});
    const TensorView part_view = view.slice(1, begin, count);
    Filler(part_view, own, global_shape, NormalNumbers(seed, operand)).fill(0, 0, 0);
  };
  std::vector<std::thread> others;
  for (std::int64_t part = 1; part < parts; ++part) others.emplace_back(fill_part, part);
  fill_part(0);
  for (std::thread& other : others) other.join();
}

}  // namespace annulus::launcher
