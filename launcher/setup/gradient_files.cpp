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
    if (options.forward_output.empty()) return;
    forward_output_ =
        open("--forward-output", options.forward_output, "output", problem.dtype, output);
    forward_lse_ = open("--forward-lse", options.forward_lse, "lse", DType::float32, lse);
  });
  const auto add = [&](const char* option, const char* name, const std::string& path,
                       const Extents& shape, NamedSharding ring::ShardedOperands::*sharding) {
    outputs_.push_back(
        {std::make_unique<files::ArrayWriter>(
             mesh.world(), path,
             std::vector<files::ArraySpec>{{name, problem.dtype, file_order(shape, bhtd_)}},
             fmt::format("{} {}", option, path)),
         sharding});
  };
  add("--grad-query", "grad_query", options.grad_query,
      {s.batch, s.query_length, s.heads, s.head_dim}, &ring::ShardedOperands::query);
  add("--grad-key", "grad_key", options.grad_key, {s.batch, s.kv_length, s.kv_heads, s.head_dim},
      &ring::ShardedOperands::key);
  add("--grad-value", "grad_value", options.grad_value,
      {s.batch, s.kv_length, s.kv_heads, s.value_dim}, &ring::ShardedOperands::value);
  if (options.grad_sinks.empty()) return;
  sinks_shape_ = problem.sinks->shape();
  sinks_writer_ = std::make_unique<files::ArrayWriter>(
      mesh.world(), options.grad_sinks,
      std::vector<files::ArraySpec>{{"grad_sinks", DType::float32, sinks_shape_}},
      fmt::format("--grad-sinks {}", options.grad_sinks));
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
    const auto make = [&](const char* name, const Extents& shape, const auto& body) {
      return verification::for_tensor(name, shape,
                                      [&] { return verification::DeviceTwin(body(), device); });
    };
    output_gradient_ = make("grad output", operands.output.local_shape(rank), [&] {
      return read_shard(*grad_output_, operands.output, rank, bhtd_, memory);
    });
    if (grad_lse_) {
      lse_gradient_ = make("grad LSE", operands.lse.local_shape(rank), [&] {
        Tensor shard(DType::float32, operands.lse.local_shape(rank), memory);
        grad_lse_->read_slice(operands.lse.index(rank), shard.view());
        return shard;
      });
    }
    if (sinks_writer_) {
      const Extents shape = sinks_sharding(operands.query, sinks_shape_).local_shape(rank);
      sinks_gradient_ =
          make("gradient", shape, [&] { return Tensor(DType::float32, shape, memory); });
    }
    for (Output& output : outputs_) {
      const Extents shape = (operands.*output.sharding).local_shape(rank);
      output.gradient =
          make("gradient", shape, [&] { return Tensor(grad_output_->dtype(), shape, memory); });
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
      outputs_[0].gradient.view(),
      outputs_[1].gradient.view(),
      outputs_[2].gradient.view(),
      forward.bias,
      forward.mask,
      grad_lse_ ? ConstTensorView(lse_gradient_.view()) : ConstTensorView()};
  if (sinks_writer_) tensors.grad_sinks = sinks_gradient_.view();
  attention.backward_and_wait(tensors);
  for (const Output& output : outputs_) output.gradient.download(device, *copies);
  if (sinks_writer_) sinks_gradient_.download(device, *copies);
  copies->synchronize();
}

void GradientFiles::write(const ring::ShardedOperands& operands) {
  const int rank = mesh_.rank();
  for (Output& output : outputs_) {
    const NamedSharding& sharding = operands.*output.sharding;
    if (!sharding.is_primary(rank)) continue;
    output.writer->write_slice(file_order(sharding.index(rank), bhtd_),
                               file_order(output.gradient.host.view(), bhtd_), 0);
  }
  if (!sinks_writer_) return;
  const NamedSharding sharding = sinks_sharding(operands.query, sinks_shape_);
  if (!sharding.is_primary(rank)) return;
  sinks_writer_->write_slice(sharding.index(rank), sinks_gradient_.host.view(), 0);
}

std::vector<files::ArrayWriter*> GradientFiles::writers() const {
  std::vector<files::ArrayWriter*> all;
  for (const Output& output : outputs_) all.push_back(output.writer.get());
  if (sinks_writer_) all.push_back(sinks_writer_.get());
  return all;
}

void GradientFiles::commit() {
  for (files::ArrayWriter* writer : writers()) writer->complete();
  for (files::ArrayWriter* writer : writers()) writer->commit();
}

}  // namespace annulus::launcher
