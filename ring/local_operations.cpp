#include <annulus/ring/local_operations.hpp>

#include "cuda/cuda_operations.hpp"

namespace annulus::ring {
namespace {

// On the CPU a stream is immediate.
class HostOperations final : public LocalOperations {
 public:
  void reset(const SoftmaxState& state, Stream& /*stream*/) const override {
    annulus::reset(state);
  }
  void merge(const SoftmaxState& state, const SoftmaxState& partial,
             Stream& /*stream*/) const override {
    annulus::merge(state, partial);
  }
  void round_output(const SoftmaxState& state, const TensorView& output,
                    Stream& /*stream*/) const override {
    annulus::round_output(state, output);
  }
  void round_lse(const SoftmaxState& state, const TensorView& lse,
                 Stream& /*stream*/) const override {
    annulus::round_lse(state, lse);
  }
  void copy(const ConstTensorView& source, const TensorView& destination,
            Stream& /*stream*/) const override {
    annulus::copy(source, destination);
  }
};

}  // namespace

std::unique_ptr<LocalOperations> make_local_operations(Place place) {
  if (!place.is_host()) return make_cuda_operations();
  return std::make_unique<HostOperations>();
}

}  // namespace annulus::ring
