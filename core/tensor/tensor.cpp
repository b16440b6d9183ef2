#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus {

Extents::Extents(std::span<const std::int64_t> values) : rank_(static_cast<int>(values.size())) {
  if (values.size() > kMaxRank) {
    throw ArgumentError("tensor rank", std::to_string(values.size()),
                        "at most " + std::to_string(kMaxRank));
  }
  std::copy(values.begin(), values.end(), values_.begin());
}

std::int64_t Extents::product() const noexcept {
  std::int64_t product = 1;
  for (const std::int64_t value : *this) product *= value;
  return product;
}

bool Extents::operator==(const Extents& other) const noexcept {
  return std::equal(begin(), end(), other.begin(), other.end());
}

std::string to_string(const Extents& extents) {
  return fmt::format("[{}]", fmt::join(extents.begin(), extents.end(), ", "));
}

Extents contiguous_strides(const Extents& shape) {
  Extents strides = shape;
  std::int64_t stride = 1;
  for (int dim = shape.rank() - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= shape[dim];
  }
  return strides;
}

bool has_nested_strides(const Extents& shape, const Extents& strides) {
  if (shape.product() == 0) return true;
  std::array<std::pair<std::int64_t, std::int64_t>, Extents::kMaxRank> dims;  // (stride, size)
  auto end = dims.begin();
  for (int dim = 0; dim < shape.rank(); ++dim) {
    if (shape[dim] <= 1) continue;
    const std::pair added{std::abs(strides[dim]), shape[dim]};
    const auto at = std::upper_bound(dims.begin(), end, added);
    std::move_backward(at, end, end + 1);
    *at = added;
    ++end;
  }
  std::int64_t last = 0;  // offset of the last element of the dimensions so far
  return std::all_of(dims.begin(), end, [&](const auto& dim) {
    const auto [stride, size] = dim;
    const bool apart = stride > last;
    last += stride * (size - 1);
    return apart;
  });
}

namespace {

// Copies dimensions [dim, rank) starting at two addresses; `run` trailing elements are contiguous
// on both sides from dimension `inner` on.
void copy_from(const ConstTensorView& source, const TensorView& destination, int dim, int inner,
               std::size_t run_bytes, const std::byte* from, std::byte* to) {
  if (dim == inner) {
    std::memcpy(to, from, run_bytes);
    return;
  }
  const auto size = static_cast<std::int64_t>(size_of(source.dtype()));
  for (std::int64_t i = 0; i < source.size(dim); ++i) {
    copy_from(source, destination, dim + 1, inner, run_bytes, from + i * source.stride(dim) * size,
              to + i * destination.stride(dim) * size);
  }
}

}  // namespace

void copy(const ConstTensorView& source, const TensorView& destination) {
  if (source.dtype() != destination.dtype() || !(source.shape() == destination.shape())) {
    throw InternalError(fmt::format("copy of {} {} to {} {}", name_of(source.dtype()),
                                    to_string(source.shape()), name_of(destination.dtype()),
                                    to_string(destination.shape())));
  }
  if (source.elements() == 0) return;
  int inner = source.rank();
  std::int64_t run = 1;
  while (inner > 0 && (source.size(inner - 1) == 1 ||
                       (source.stride(inner - 1) == run && destination.stride(inner - 1) == run))) {
    run *= source.size(--inner);
  }
  copy_from(source, destination, 0, inner, static_cast<std::size_t>(run) * size_of(source.dtype()),
            static_cast<const std::byte*>(source.data()),
            static_cast<std::byte*>(destination.data()));
}

namespace {

// Tensors are made for every call, so the description is made only for an error.
Buffer allocate_tensor(DType dtype, const Extents& shape, MemoryPool& pool) {
  try {
    return pool.allocate(static_cast<std::size_t>(shape.product()) * size_of(dtype));
  } catch (const LibraryError& error) {
    throw LibraryError(
        fmt::format("tensor {} of {}: {}", to_string(shape), name_of(dtype), error.what()));
  }
}

}  // namespace

Tensor::Tensor() noexcept = default;
Tensor::Tensor(DType dtype, const Extents& shape, MemoryPool& pool)
    : buffer_(std::make_unique<Buffer>(allocate_tensor(dtype, shape, pool))),
      data_(buffer_->data()),
      place_(pool.place()),
      dtype_(dtype),
      shape_(shape) {}
Tensor::Tensor(Tensor&& other) noexcept
    : buffer_(std::move(other.buffer_)),
      data_(std::exchange(other.data_, nullptr)),
      place_(other.place_),
      dtype_(other.dtype_),
      shape_(other.shape_) {}
Tensor& Tensor::operator=(Tensor&& other) noexcept {
  buffer_ = std::move(other.buffer_);
  data_ = std::exchange(other.data_, nullptr);
  place_ = other.place_;
  dtype_ = other.dtype_;
  shape_ = other.shape_;
  return *this;
}
Tensor::~Tensor() = default;

void Tensor::fill_zero() {
  std::memset(data_, 0, bytes());
}

}  // namespace annulus
