#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include <annulus/core/cuda.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/tensor.hpp>

#include "tests/support/test_world.hpp"

namespace annulus::test {

/// A fixture with the first GPU and a stream on it; tests are skipped where there is none.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
    device_ = make_cuda_device(0);
    stream_ = device_->make_stream("compute", kWatchdog, nullptr);
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

/// The view of `twin` that lies as `view` does in `whole`, a tensor of the same shape and dtype.
inline TensorView same_view(const ConstTensorView& view, const Tensor& whole, const Tensor& twin) {
  const auto offset = static_cast<const std::byte*>(view.data()) -
                      static_cast<const std::byte*>(whole.view().data());
  return {static_cast<std::byte*>(twin.view().data()) + offset, view.dtype(), view.shape(),
          view.strides(), twin.view().place()};
}

}  // namespace annulus::test
