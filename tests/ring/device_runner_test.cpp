// The plans of runner_test.cpp on GPU ranks, over every transport that they have.
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/mesh/mesh.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tests/ring/backward_programs.hpp"
#include "tests/support/rank_device.hpp"

namespace annulus::ring {
namespace {

// Computes on the host, until kernels of the GPU have gradients.
class StagedKernel final : public Kernel {
 public:
  StagedKernel(std::unique_ptr<Kernel> host, Device& device)
      : host_(std::move(host)), device_(device) {}

  void forward(const AttentionBlock& /*block*/, const SoftmaxState& /*result*/,
               const ExecutionContext& /*context*/) override {
    FAIL() << "only gradients are staged";
  }
  void backward(const annulus::BackwardBlock& block, const Gradients& gradients,
                const ExecutionContext& context) override {
    annulus::BackwardBlock fetched = block;
    for (ConstTensorView* view : {&fetched.query, &fetched.key, &fetched.value,
                                  &fetched.grad_output, &fetched.lse, &fetched.delta}) {
      *view = fetch(*view, context.stream);
    }
    const Gradients added{fetch(gradients.query, context.stream),
                          fetch(gradients.key, context.stream),
                          fetch(gradients.value, context.stream)};
    HostDevice host;
    const auto stream = host.make_stream("host", annulus::test::kWatchdog, nullptr);
    host_->backward(fetched, added, {*stream});
    put(added.query, gradients.query, context.stream);
    put(added.key, gradients.key, context.stream);
    put(added.value, gradients.value, context.stream);
    copies_.clear();
  }

 private:
  // Copies between host and device have no gaps, so strided tensors go by a twin on the device.
  TensorView fetch(const ConstTensorView& view, Stream& stream) {
    const Tensor twin(view.dtype(), view.shape(), device_.memory());
    copies_.emplace_back(view.dtype(), view.shape(), annulus::test::test_memory());
    device_.copy(view, twin.view(), stream);
    device_.copy(twin.view(), copies_.back().view(), stream);
    stream.synchronize();
    return copies_.back().view();
  }
  void put(const TensorView& copy, const TensorView& view, Stream& stream) {
    const Tensor twin(view.dtype(), view.shape(), device_.memory());
    device_.copy(copy, twin.view(), stream);
    device_.copy(twin.view(), view, stream);
    stream.synchronize();
  }

  std::deque<Tensor> copies_;
  std::unique_ptr<Kernel> host_;
  Device& device_;
};

class DeviceRunner : public annulus::test::RankDeviceTest<> {};

TEST_F(DeviceRunner, GradientsOfEveryProgramAgreeWithTheOracle) {
  HostDevice host;
  const annulus::test::WrappedNative staged(
      "staged",
      [&](std::unique_ptr<Kernel> kernel) {
        return std::make_unique<StagedKernel>(std::move(kernel), device());
      },
      1, "vanilla", &host);
  for (const Transport transport : {Transport::peer, Transport::nccl, Transport::composite}) {
    // NCCL wants a GPU for every rank.
    if (shared_gpus() && transport != Transport::peer) continue;
    for (const test::Program& program : test::backward_programs(annulus::test::session().size())) {
      SCOPED_TRACE(to_string(program) + ", " + std::string(name_of(transport)));
      Mesh mesh(program.mesh, annulus::test::session().world(), annulus::test::kWatchdog);
      test::expect_gradients(program, mesh, device(), staged, transport);
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace annulus::ring
