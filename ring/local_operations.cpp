#include <annulus/ring/local_operations.hpp>

#include "cuda/cuda_operations.hpp"

namespace annulus::ring {
namespace {

// On the CPU a stream is immediate.
class HostOperations final : public LocalOperations {
 public:
  void combine(std::span<const PartialState> parts, const SoftmaxState& result,
               Stream& /*stream*/) const override {
    annulus::combine(parts, result);
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
