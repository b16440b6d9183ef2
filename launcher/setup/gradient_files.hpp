#pragma once

#include <optional>
#include <vector>

#include <annulus/core/device.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/files/array_file.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/verification/device_twin.hpp>

#include "launcher/options/options.hpp"
#include "launcher/setup/result_files.hpp"

namespace annulus::launcher {

/// The backward pass of annulus run: reads --grad-output and --grad-lse, and --forward-output and
/// --forward-lse if they replace the forward pass; writes --grad-query, --grad-key, --grad-value,
/// --grad-sinks and --grad-bias, each to a file of its own or several to one .safetensors file.
class GradientFiles {
 public:
  /// Opens the inputs, so that errors show before any work. Collective over
  /// the mesh. Throws FileError naming the option. The references must outlive the object.
  GradientFiles(const Options& options, const AttentionProblem& problem,
                const ring::ShardedOperands& operands, Mesh& mesh);

  /// The kind of the backward call.
  [[nodiscard]] const ring::BackwardRequest& request() const noexcept { return request_; }
  /// True if the results of the forward pass come from files.
  [[nodiscard]] bool has_forward() const noexcept { return forward_output_.has_value(); }
  /// Reads the rank's shards of these results into tensors of host memory. Not collective.
  void read_forward(const TensorView& output, const TensorView& lse) const;
  /// Reads the rank's shards and takes memory for gradients. Collective.
  void read(Device& device);
  /// Computes the gradients from the inputs and results of the forward pass, in device memory.
  /// Collective.
  void compute(Attention& attention, const ring::LocalTensors& forward, Device& device);
  /// The gradients to write.
  [[nodiscard]] std::vector<Result> results() const;
  /// Writes the rank's shards of them. Collective.
  void write(ResultFiles& files) const;

 private:
  struct Output {
    Result result;
    TensorView ring::BackwardLocalTensors::*tensor;
    verification::DeviceTwin gradient = {};
  };

  const ring::ShardedOperands& operands_;
  Mesh& mesh_;
  bool bhtd_;
  std::optional<files::ArrayFile> grad_output_, grad_lse_, forward_output_, forward_lse_;
  ring::BackwardRequest request_;
  std::vector<Output> outputs_;
  verification::DeviceTwin output_gradient_, lse_gradient_;
};

}  // namespace annulus::launcher
