#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <annulus/core/dtype.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/place.hpp>

namespace annulus {

class Buffer;
class MemoryPool;

/// Up to kMaxRank sizes or strides, stored in place: making a view never allocates.
class Extents {
 public:
  static constexpr int kMaxRank = 6;

  Extents() = default;
  Extents(std::initializer_list<std::int64_t> values)
      : Extents(std::span(values.begin(), values.size())) {}
  explicit Extents(std::span<const std::int64_t> values);

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] std::int64_t operator[](int dim) const noexcept { return values_[index(dim)]; }
  [[nodiscard]] std::int64_t& operator[](int dim) noexcept { return values_[index(dim)]; }
  [[nodiscard]] const std::int64_t* begin() const noexcept { return values_.data(); }
  [[nodiscard]] const std::int64_t* end() const noexcept { return values_.data() + rank_; }
  /// Product of the values; 1 for rank 0.
  [[nodiscard]] std::int64_t product() const noexcept;
  bool operator==(const Extents& other) const noexcept;

 private:
  static std::size_t index(int dim) noexcept { return static_cast<std::size_t>(dim); }
  std::array<std::int64_t, kMaxRank> values_{};
  int rank_ = 0;
};

/// "[2, 8, 64]".
[[nodiscard]] std::string to_string(const Extents& extents);
/// Row-major strides, in elements.
[[nodiscard]] Extents contiguous_strides(const Extents& shape);

/// A strided view of memory that it does not own. Strides count elements, not bytes. `Void` is
/// `void` for a writable view and `const void` for a read-only one.
template <class Void>
class BasicTensorView {
 public:
  template <class T>
  using Pointer = std::conditional_t<std::is_const_v<Void>, const T*, T*>;

  BasicTensorView() = default;
  BasicTensorView(Void* data, DType dtype, const Extents& shape, Place place = Place::host())
      : BasicTensorView(data, dtype, shape, contiguous_strides(shape), place) {}
  BasicTensorView(Void* data, DType dtype, const Extents& shape, const Extents& strides,
                  Place place = Place::host())
      : data_(data), dtype_(dtype), shape_(shape), strides_(strides), place_(place) {}
  /// A writable view converts to a read-only one.
  template <class Other>
  // NOLINTNEXTLINE(google-explicit-constructor)
  BasicTensorView(const BasicTensorView<Other>& other) requires(std::is_const_v<Void> &&
                                                                !std::is_const_v<Other>)
      : BasicTensorView(other.data(), other.dtype(), other.shape(), other.strides(),
                        other.place()) {}

  /// The same view of the same memory.
  bool operator==(const BasicTensorView&) const = default;

  [[nodiscard]] Void* data() const noexcept { return data_; }
  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] const Extents& shape() const noexcept { return shape_; }
  [[nodiscard]] const Extents& strides() const noexcept { return strides_; }
  [[nodiscard]] Place place() const noexcept { return place_; }
  [[nodiscard]] int rank() const noexcept { return shape_.rank(); }
  [[nodiscard]] std::int64_t size(int dim) const noexcept { return shape_[dim]; }
  [[nodiscard]] std::int64_t stride(int dim) const noexcept { return strides_[dim]; }
  [[nodiscard]] std::int64_t elements() const noexcept { return shape_.product(); }
  /// Bytes of the elements (not of the gaps between them).
  [[nodiscard]] std::size_t bytes() const noexcept {
    return static_cast<std::size_t>(elements()) * size_of(dtype_);
  }
  [[nodiscard]] bool is_contiguous() const noexcept {
    return strides_ == contiguous_strides(shape_);
  }

  /// The data as T; throws InternalError if T is not the dtype.
  template <class T>
  [[nodiscard]] Pointer<T> as() const {
    if (dtype_of<T> != dtype_) {
      throw InternalError("tensor of " + std::string(name_of(dtype_)) + " read as " +
                          std::string(name_of(dtype_of<T>)));
    }
    return static_cast<Pointer<T>>(data_);
  }

  /// Address of the element at `index` (one entry per dimension).
  [[nodiscard]] Void* address(std::initializer_list<std::int64_t> index) const noexcept {
    std::int64_t offset = 0;
    int dim = 0;
    for (const std::int64_t i : index) offset += i * strides_[dim++];
    return offset_by(offset);
  }

  template <class T>
  [[nodiscard]] auto& at(std::initializer_list<std::int64_t> index) const {
    return *static_cast<Pointer<T>>(address(index));
  }

  /// Entries [begin, begin + count) of one dimension.
  [[nodiscard]] BasicTensorView slice(int dim, std::int64_t begin, std::int64_t count) const {
    BasicTensorView view = *this;
    view.data_ = offset_by(begin * strides_[dim]);
    view.shape_[dim] = count;
    return view;
  }

  /// Dimensions in a new order: result dimension i is this view's dimension order[i].
  [[nodiscard]] BasicTensorView permute(std::initializer_list<int> order) const {
    BasicTensorView view = *this;
    int dim = 0;
    for (const int from : order) {
      view.shape_[dim] = shape_[from];
      view.strides_[dim] = strides_[from];
      ++dim;
    }
    return view;
  }

 private:
  // Computed as a number, since views are also sliced at null, before there is memory, where
  // pointer arithmetic is undefined.
  [[nodiscard]] Void* offset_by(std::int64_t elements) const noexcept {
    const auto bytes = elements * static_cast<std::int64_t>(size_of(dtype_));
    return reinterpret_cast<Void*>(reinterpret_cast<std::intptr_t>(data_) + bytes);
  }

  Void* data_ = nullptr;
  DType dtype_ = DType::float32;
  Extents shape_;
  Extents strides_;
  Place place_;
};

/// True if strides nest in each other, in some order of the dimensions, as in any allocation, so
/// that no two elements share memory.
[[nodiscard]] bool has_nested_strides(const Extents& shape, const Extents& strides);

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

/// Copies elements between host views of equal shape and dtype, with any strides.
void copy(const ConstTensorView& source, const TensorView& destination);

/// A contiguous tensor that owns its memory. Contents are uninitialised. Move-only.
class Tensor {
 public:
  /// Without dimensions and without memory.
  Tensor() noexcept;
  /// `pool`, such as Context::memory(), must outlive the tensor.
  Tensor(DType dtype, const Extents& shape, MemoryPool& pool);
  Tensor(Tensor&& other) noexcept;
  Tensor& operator=(Tensor&& other) noexcept;
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor();

  [[nodiscard]] TensorView view() const noexcept { return {data_, dtype_, shape_, place_}; }
  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] const Extents& shape() const noexcept { return shape_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return view().bytes(); }
  /// Host tensors only.
  void fill_zero();

 private:
  std::unique_ptr<Buffer> buffer_;
  void* data_ = nullptr;  // of the buffer
  Place place_;
  DType dtype_ = DType::float32;
  Extents shape_;
};

}  // namespace annulus
