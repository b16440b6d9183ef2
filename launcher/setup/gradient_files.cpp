#include "launcher/setup/gradient_files.hpp"

#include <memory>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/verification/for_tensor.hpp>
#include <annulus/verification/gradient_shards.hpp>

#include "launcher/options/as_option.hpp"
#include "launcher/setup/input_tensors.hpp"

namespace annulus::launcher {
namespace {

files::ArrayFile open(const char* option, const std::string& path, const char* name, DType dtype,
                      const Extents& shape) {
  return as_option(fmt::format("{} {}", option, path), [&] {
    files::ArrayFile file(path, name, {dtype});
    if (file.shape() == shape) return file;
    throw FileError(path, fmt::format("{}: shape {}, expected {}", name, to_string(file.shape()),
                                      to_string(shape)));
  });
}

}  // namespace

GradientFiles::GradientFiles(const Options& options, const AttentionProblem& problem,
                             const ring::ShardedOperands& operands, Mesh& mesh)
    : operands_(operands), mesh_(mesh), bhtd_(options.bhtd) {
  collectively(mesh.world(), "gradients of the results", [&] {
    const Extents output = file_order(operands.output.global_shape(), bhtd_);
    const Extents& lse = operands.lse.global_shape();
    grad_output_ = open("--grad-output", options.grad_output, "grad_output", problem.dtype, output);
    if (!options.grad_lse.empty()) {
      grad_lse_ = open("--grad-lse", options.grad_lse, "grad_lse", DType::float32, lse);
    }
    if (!options.grad_bias.empty() && !problem.bias) {
      throw UserError(
          fmt::format("--grad-bias {}: there is no bias to have a gradient; it needs "
                      "--bias",
                      options.grad_bias));
    }
    if (options.forward_output.empty()) return;
    forward_output_ =
        open("--forward-output", options.forward_output, "output", problem.dtype, output);
    forward_lse_ = open("--forward-lse", options.forward_lse, "lse", DType::float32, lse);
  });
  request_.grad_lse = grad_lse_.has_value();
  request_.grad_sinks = !options.grad_sinks.empty();
  request_.grad_bias = !options.grad_bias.empty();
  using Tensors = ring::BackwardLocalTensors;
  const auto add = [&](TensorView Tensors::*tensor, Result result) {
    outputs_.push_back({std::move(result), tensor});
  };
  const DType dtype = problem.dtype;
  add(&Tensors::grad_query, {"grad_query", options.grad_query, dtype, operands.query, bhtd_});
  add(&Tensors::grad_key, {"grad_key", options.grad_key, dtype, operands.key, bhtd_});
  add(&Tensors::grad_value, {"grad_value", options.grad_value, dtype, operands.value, bhtd_});
  if (request_.grad_sinks) {
    add(&Tensors::grad_sinks,
        {"grad_sinks", options.grad_sinks, DType::float32,
         verification::sinks_sharding(operands.query, problem.sinks->shape())});
  }
  if (request_.grad_bias) {
    add(&Tensors::grad_bias,
        {"grad_bias", options.grad_bias, DType::float32, operands.bias.value()});
  }
}

std::vector<Result> GradientFiles::results() const {
  std::vector<Result> results;
  for (const Output& output : outputs_) results.push_back(output.result);
  return results;
}

void GradientFiles::read_forward(const TensorView& output, const TensorView& lse) const {
  const int rank = mesh_.rank();
  forward_output_->read_slice(file_order(operands_.output.index(rank), bhtd_),
                              file_order(output, bhtd_));
  forward_lse_->read_slice(operands_.lse.index(rank), lse);
}

void GradientFiles::read(Device& device) {
  const int rank = mesh_.rank();
  collectively(mesh_.world(), "gradients of the results", [&] {
    constexpr double kDiskTimeouts = 20;  // may pass before a disk counts as hung
    const Computing reading = mesh_.world().computing(kDiskTimeouts);
    MemoryPool& memory = device.staging();
    const auto make = [&](const char* name, const auto& body) {
      return verification::for_tensor(name,
                                      [&] { return verification::DeviceTwin(body(), device); });
    };
    output_gradient_ = make("grad output", [&] {
      return read_shard(*grad_output_, operands_.output, rank, bhtd_, memory);
    });
    if (grad_lse_) {
      lse_gradient_ = make(
          "grad LSE", [&] { return read_shard(*grad_lse_, operands_.lse, rank, false, memory); });
    }
    for (Output& output : outputs_) {
      const Extents shape = output.result.sharding.local_shape(rank);
      output.gradient =
          make("gradient", [&] { return Tensor(output.result.dtype, shape, memory); });
    }
  });
}

void GradientFiles::compute(Attention& attention, const ring::LocalTensors& forward,
                            Device& device) {
  const std::unique_ptr<Stream> copies = device.make_stream("copies", mesh_.watchdog(), nullptr);
  output_gradient_.upload(device, *copies);
  lse_gradient_.upload(device, *copies);
  copies->synchronize();
  ring::BackwardLocalTensors tensors = verification::backward_tensors(forward);
  tensors.grad_output = output_gradient_.view();
  if (grad_lse_) tensors.grad_lse = lse_gradient_.view();
  for (const Output& output : outputs_) tensors.*output.tensor = output.gradient.view();
  attention.backward_and_wait(tensors);
  for (const Output& output : outputs_) output.gradient.download(device, *copies);
  copies->synchronize();
}

void GradientFiles::write(ResultFiles& files) const {
  for (const Output& output : outputs_) {
    files.write(output.result.name, output.gradient.host.view());
  }
}

}  // namespace annulus::launcher
