#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/convert.hpp>
#include <annulus/ring/sharded_attention.hpp>
#include <annulus/verification/comparison.hpp>
#include <annulus/verification/verification.hpp>

#include "tests/support/rank_device.hpp"

namespace annulus::ring {

/// Host shards and their copies on the device.
class Twins {
 public:
  Twins(const verification::CaseShards& host, Device& device)
      : host_(host),
        device_(device),
        stream_(device.make_stream("copies", test::kWatchdog, nullptr)) {
    for (const Tensor* tensor : {&host.query, &host.key, &host.value, &host.output, &host.lse}) {
      twins_.emplace_back(tensor->view().dtype(), tensor->shape(), device.memory());
    }
  }
  [[nodiscard]] LocalTensors tensors() const {
    return {twins_[0].view(), twins_[1].view(), twins_[2].view(), twins_[3].view(),
            twins_[4].view()};
  }
  void upload() {
    copy(host_.query.view(), twins_[0].view());
    copy(host_.key.view(), twins_[1].view());
    copy(host_.value.view(), twins_[2].view());
  }
  void download() {
    copy(twins_[3].view(), host_.output.view());
    copy(twins_[4].view(), host_.lse.view());
  }

 private:
  void copy(const ConstTensorView& from, const TensorView& to) {
    device_.copy(from, to, *stream_);
    stream_->synchronize();
  }
  const verification::CaseShards& host_;
  Device& device_;
  std::unique_ptr<Stream> stream_;
  std::vector<Tensor> twins_;
};

/// Entries become entry · factor + shift.
inline void transform(const TensorView& tensor, float factor, float shift) {
  std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
  to_float32(tensor.data(), tensor.dtype(), values.data(), tensor.elements());
  for (float& value : values) value = value * factor + shift;
  from_float32(values.data(), tensor.dtype(), tensor.data(), tensor.elements());
}

/// The attention of a case on this rank, with random shards in host memory and on the device.
struct CaseOnDevice {
  /// Collective.
  CaseOnDevice(const verification::ShardedCase& one, const ShardedAttentionOptions& options,
               Mesh& mesh, const Registry& registry, Device& device)
      : operands(shard_operands(one.problem, mesh.shape(), one.layout)),
        attention(one.problem, operands, mesh, registry, device, options),
        shards(operands, one.problem.dtype, one.seed, mesh.rank(), memory),
        twins(shards, device) {}

  /// The results arrive in the shards.
  void run() {
    attention.run(twins.tensors());
    twins.download();
  }
  /// The bits of the results in the shards.
  [[nodiscard]] std::vector<std::byte> bits() const {
    std::vector<std::byte> result;
    for (const Tensor* tensor : {&shards.output, &shards.lse}) {
      const auto* data = static_cast<const std::byte*>(tensor->view().data());
      result.insert(result.end(), data, data + tensor->bytes());
    }
    return result;
  }

  ShardedOperands operands;
  ShardedAttention attention;
  HostMemoryPool memory;
  verification::CaseShards shards;
  Twins twins;
};

/// Sharded attention on the ranks of a mesh "sp", a GPU each or shared ones.
class DeviceAttention : public test::RankDeviceTest<> {
 protected:
  void SetUp() override {
    RankDeviceTest::SetUp();
    if (IsSkipped()) return;
    mesh_ = std::make_unique<Mesh>(MeshShape({{"sp", test::session().size()}}),
                                   test::session().world(), test::kWatchdog);
  }

  [[nodiscard]] static std::vector<Transport> transports() {
    if (shared_gpus()) return {Transport::peer};
    return {Transport::peer, Transport::nccl, Transport::composite};
  }

  /// The schedules of several ranks, or the only schedule of one rank.
  [[nodiscard]] static std::vector<std::string> schedules(std::vector<std::string> several = {
                                                              "ring", "allgather"}) {
    return test::session().size() == 1 ? std::vector<std::string>{"local"} : several;
  }

  [[nodiscard]] static verification::ShardedCase case_of(std::int64_t length, std::int64_t heads,
                                                         std::int64_t kv_heads, std::int64_t dim) {
    verification::ShardedCase result;
    result.problem.shape = {1, length, length, heads, kv_heads, dim, dim};
    result.problem.dtype = DType::bfloat16;
    result.problem.mask.set_causal(true);
    result.layout.query = result.layout.kv = PartitionSpec::parse("-,sp");
    result.layout.sequence = LayoutKind::zigzag;
    result.schedule = test::session().size() == 1 ? "local" : "ring";
    return result;
  }

  // Collective.
  void expect_verified(const verification::ShardedCase& one) {
    expect_verified(one, mesh_->shape());
  }
  void expect_verified(const verification::ShardedCase& one, const MeshShape& shape) {
    if (!context_) {
      context_ = std::make_unique<Context>(
          test::session().world(),
          ContextOptions{.devices = DeviceRule::gpus, .share_gpus = shared_gpus(), .timeout = 60});
    }
    std::unique_ptr<Context>& of_mesh = meshes_[to_string(shape)];
    if (!of_mesh) {
      of_mesh = std::make_unique<Context>(test::session().world(), shape, *context_);
    }
    const verification::Verification found = verification::verify_sharded(one, *of_mesh);
    EXPECT_EQ(found.failure(), "")
        << to_string(one.problem.shape) << " " << annulus::name_of(one.problem.dtype) << " mask "
        << to_string(one.problem.mask) << " " << one.schedule << " by " << name_of(one.transport)
        << ", " << one.implementation;
  }

  [[nodiscard]] static ShardedAttentionOptions options_of(const verification::ShardedCase& one) {
    ShardedAttentionOptions options;
    options.implementation = one.implementation;
    options.transport = one.transport;
    options.schedule = one.schedule;
    options.plan = one.plan;
    return options;
  }

  // Collective.
  [[nodiscard]] CaseOnDevice on_device(const verification::ShardedCase& one) {
    return {one, options_of(one), *mesh_, registry_, device()};
  }

  Registry registry_ = Registry::standard();
  std::unique_ptr<Mesh> mesh_;
  std::unique_ptr<Context> context_;                        // of verifications …
  std::map<std::string, std::unique_ptr<Context>> meshes_;  // … by mesh
};

}  // namespace annulus::ring
