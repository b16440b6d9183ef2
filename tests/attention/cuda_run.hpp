#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <annulus/core/cuda_stream.hpp>

#include "tests/attention/device_run.hpp"
#include "tests/support/cuda_test.hpp"

namespace annulus::test {

/// The memory of a host tensor on the device; views of the one become views of the other.
class Mirror {
 public:
  Mirror(const Tensor& host, Device& device)
      : host_(host), device_(host.dtype(), host.shape(), device.memory()) {
    if (host.bytes() == 0) return;
    check_cuda(
        cudaMemcpy(device_.view().data(), host.view().data(), host.bytes(), cudaMemcpyHostToDevice),
        "upload");
    check_cuda(cudaDeviceSynchronize(), "upload");
  }

  [[nodiscard]] TensorView at(const ConstTensorView& view) const {
    return same_view(view, host_, device_);
  }
  [[nodiscard]] TensorView view() const { return device_.view(); }

  /// Overwrites the host tensor. The stream's work must have finished.
  void download() const {
    if (host_.bytes() == 0) return;
    check_cuda(cudaMemcpy(host_.view().data(), device_.view().data(), host_.bytes(),
                          cudaMemcpyDeviceToHost),
               "download");
  }

 private:
  const Tensor& host_;
  Tensor device_;
};

/// The expected result of a part of the columns: the CPU kernel's, which the suite compares
/// with the oracle.
inline OracleOutput reference_of(const AttentionProblem& problem, const AttentionBlock& block) {
  const Result result = run_native(problem, block, 2);
  const auto* output = result.output.view().as<float>();
  const auto* lse = result.lse.view().as<float>();
  return {std::vector<double>(output, output + result.output.shape().product()),
          std::vector<double>(lse, lse + result.lse.shape().product())};
}

}  // namespace annulus::test
