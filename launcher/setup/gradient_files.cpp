#include "launcher/setup/gradient_files.hpp"

#include <memory>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/verification/for_tensor.hpp>

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

// [N,M] by head, [M] whole on every rank.
NamedSharding sinks_sharding(const NamedSharding& query, const Extents& sinks) {
  std::vector<AxisNames> axes;
  if (sinks.rank() == 2) axes.push_back(query.spec()[2]);
  return {query.mesh(), PartitionSpec(axes), sinks};
}

}  // namespace

GradientFiles::GradientFiles(const Options& options, const AttentionProblem& problem, Mesh& mesh)
    : mesh_(mesh), bhtd_(options.bhtd) {
  const AttentionShape& s = problem.shape;
  collectively(mesh.world(), "gradients of the results", [&] {
    const Extents output =
        file_order(Extents{s.batch, s.query_length, s.heads, s.value_dim}, bhtd_);
    const Extents lse{s.batch, s.heads, s.query_length};
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
  using Operands = ring::ShardedOperands;
  using Tensors = ring::BackwardLocalTensors;
  const auto add = [&](TensorView Tensors::*tensor, Result result) {
    outputs_.push_back({std::move(result), tensor});
  };
  const Extents query{s.batch, s.query_length, s.heads, s.head_dim};
  const Extents key{s.batch, s.kv_length, s.kv_heads, s.head_dim};
  const Extents value{s.batch, s.kv_length, s.kv_heads, s.value_dim};
  add(&Tensors::grad_query,
      {"grad_query", options.grad_query, problem.dtype, query, &Operands::query, bhtd_});
  add(&Tensors::grad_key,
      {"grad_key", options.grad_key, problem.dtype, key, &Operands::key, bhtd_});
  add(&Tensors::grad_value,
      {"grad_value", options.grad_value, problem.dtype, value, &Operands::value, bhtd_});
  if (request_.grad_sinks) {
    const Extents shape = problem.sinks->shape();
    const auto sharding = [shape](const Operands& operands) {
      return sinks_sharding(operands.query, shape);
    };
    add(&Tensors::grad_sinks, {"grad_sinks", options.grad_sinks, DType::float32, shape, sharding});
  }
  if (request_.grad_bias) {
    const auto sharding = [](const Operands& operands) { return operands.bias.value(); };
    add(&Tensors::grad_bias,
        {"grad_bias", options.grad_bias, DType::float32, *problem.bias, sharding});
  }
}

std::vector<Result> GradientFiles::results() const {
  std::vector<Result> results;
  for (const Output& output : outputs_) results.push_back(output.result);
  return results;
}

void GradientFiles::read_forward(const ring::ShardedOperands& operands, const TensorView& output,
                                 const TensorView& lse) const {
  const int rank = mesh_.rank();
  forward_output_->read_slice(file_order(operands.output.index(rank), bhtd_),
                              file_order(output, bhtd_));
  forward_lse_->read_slice(operands.lse.index(rank), lse);
}

void GradientFiles::read(const ring::ShardedOperands& operands, Device& device) {
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
      return read_shard(*grad_output_, operands.output, rank, bhtd_, memory);
    });
    if (grad_lse_) {
      lse_gradient_ = make("grad LSE", [&] {
        Tensor shard(DType::float32, operands.lse.local_shape(rank), memory);
        grad_lse_->read_slice(operands.lse.index(rank), shard.view());
        return shard;
      });
    }
    for (Output& output : outputs_) {
      const Extents shape = output.result.sharding(operands).local_shape(rank);
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
  ring::BackwardLocalTensors tensors{
      forward.query,
      forward.key,
      forward.value,
      forward.output,
      forward.lse,
      output_gradient_.view(),
      {},
      {},
      {},
      forward.bias,
      forward.mask,
      grad_lse_ ? ConstTensorView(lse_gradient_.view()) : ConstTensorView()};
  for (const Output& output : outputs_) tensors.*output.tensor = output.gradient.view();
  attention.backward_and_wait(tensors);
  for (const Output& output : outputs_) output.gradient.download(device, *copies);
  copies->synchronize();
}

void GradientFiles::write(const ring::ShardedOperands& operands, ResultFiles& files) const {
  for (const Output& output : outputs_) {
    files.write(output.result.name, output.gradient.host.view(), operands);
  }
}

}  // namespace annulus::launcher
