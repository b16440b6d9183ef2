// Copies on a GPU, and between it and the host.
#include <cstdint>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/device.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/tensor.hpp>

#include "tests/support/cuda_test.hpp"

namespace annulus {
namespace {

using test::same_view;

class DeviceCopy : public test::CudaTest {
 protected:
  // Bytes that differ from their neighbours.
  static Tensor numbered(DType dtype, const Extents& shape, MemoryPool& pool, unsigned first = 1) {
    Tensor tensor(dtype, shape, pool);
    auto* const bytes = static_cast<unsigned char*>(tensor.view().data());
    for (std::size_t i = 0; i < tensor.bytes(); ++i) {
      bytes[i] = static_cast<unsigned char>(i * 167 + i / 251 + first);
    }
    return tensor;
  }
  [[nodiscard]] Tensor on_device(const Tensor& host) {
    Tensor tensor(host.dtype(), host.shape(), device_->memory());
    device_->copy(host.view(), tensor.view(), *stream_);
    return tensor;
  }
  [[nodiscard]] std::vector<unsigned char> downloaded(const Tensor& tensor) {
    const Tensor host(tensor.dtype(), tensor.shape(), host_.memory());
    device_->copy(tensor.view(), host.view(), *stream_);
    stream_->synchronize();
    return bytes_of(host);
  }
  static std::vector<unsigned char> bytes_of(const Tensor& host) {
    const auto* const begin = static_cast<const unsigned char*>(host.view().data());
    return {begin, begin + host.bytes()};
  }

  HostDevice host_;
};

TEST_F(DeviceCopy, TakesWhateverStridesAndDimensions) {
  for (const DType dtype :
       {DType::boolean, DType::float16, DType::bfloat16, DType::float32, DType::float64}) {
    const Tensor four = numbered(dtype, {3, 5, 7, 16}, host_.memory());
    const Tensor six = numbered(dtype, {2, 3, 2, 4, 3, 8}, host_.memory());
    const auto check = [&](const Tensor& whole, const TensorView& view) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + to_string(view.shape()) + " strides " +
                   to_string(view.strides()));
      const Tensor there = on_device(whole);
      // Out of the view, then into it.
      const Tensor packed = on_device(numbered(dtype, view.shape(), host_.memory(), 77));
      device_->copy(same_view(view, whole, there), packed.view(), *stream_);
      const Tensor expected(dtype, view.shape(), host_.memory());
      copy(view, expected.view());
      EXPECT_EQ(downloaded(packed), bytes_of(expected));

      const Tensor filling = numbered(dtype, view.shape(), host_.memory(), 123);
      device_->copy(on_device(filling).view(), same_view(view, whole, there), *stream_);
      const Tensor changed(dtype, whole.shape(), host_.memory());
      copy(whole.view(), changed.view());
      copy(filling.view(), same_view(view, whole, changed));
      EXPECT_EQ(downloaded(there), bytes_of(changed));
    };
    check(four, four.view());
    check(four, four.view().permute({0, 2, 1, 3}));
    check(four, four.view().slice(3, 0, 8));
    check(four, four.view().slice(3, 3, 5));
    check(four, four.view().permute({3, 1, 2, 0}));
    check(four, four.view().slice(1, 2, 0));
    check(six, six.view());
    check(six, six.view().permute({5, 0, 3, 1, 4, 2}));
    check(six, six.view().slice(2, 1, 1).slice(5, 2, 3));
  }
}

// More than one launch takes, of all widths, and long rows of single elements.
TEST_F(DeviceCopy, TakesManyAtOnce) {
  const Tensor whole = numbered(DType::float32, {70, 9, 3000}, host_.memory());
  const Tensor there = on_device(whole);
  Tensor transposed(DType::float32, {70, 3000, 9}, device_->memory());
  std::vector<TensorCopy> copies;
  for (std::int64_t i = 0; i < 70; ++i) {
    copies.push_back(
        {there.view().slice(0, i, 1).permute({0, 2, 1}), transposed.view().slice(0, i, 1)});
  }
  device_->copy(copies, *stream_);
  Tensor expected(DType::float32, {70, 3000, 9}, host_.memory());
  copy(whole.view().permute({0, 2, 1}), expected.view());
  EXPECT_EQ(downloaded(transposed), bytes_of(expected));
}

TEST_F(DeviceCopy, RefusesWhatDoesNotFit) {
  const Tensor host = numbered(DType::float32, {2, 3, 8}, host_.memory());
  const Tensor there = on_device(host);
  const Tensor other(DType::float32, {2, 3, 4}, device_->memory());
  const Tensor narrow(DType::float16, {2, 3, 8}, device_->memory());
  EXPECT_THROW(device_->copy(there.view(), other.view(), *stream_), InternalError);
  EXPECT_THROW(device_->copy(there.view(), narrow.view(), *stream_), InternalError);
  // With gaps, from the host or to it.
  EXPECT_THROW(device_->copy(host.view().slice(2, 0, 4), other.view(), *stream_), InternalError);
  const Tensor small(DType::float32, {2, 3, 4}, host_.memory());
  EXPECT_THROW(device_->copy(there.view().slice(2, 0, 4), small.view(), *stream_), InternalError);
  stream_->synchronize();
}

}  // namespace
}  // namespace annulus
