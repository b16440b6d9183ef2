#include <cstddef>
#include <cstdint>
#include <vector>

#include <annulus/core/error.hpp>
#include <annulus/ring/local_operations.hpp>

#include "runner/cuda/cuda_operations.hpp"

namespace annulus::ring {
namespace {

// Calls body(first element of a row in every view) for all rows: runs of the last dimension.
template <class Body>
void for_each_row(const TensorView& view, const Body& body) {
  std::int64_t rows = 1;
  for (int dim = 0; dim + 1 < view.rank(); ++dim) rows *= view.size(dim);
  for (std::int64_t row = 0; row < rows; ++row) {
    body([row, &view](const auto& other) {
      std::int64_t offset = 0;
      std::int64_t rest = row;
      for (int dim = view.rank() - 2; dim >= 0; --dim) {
        offset += rest % view.size(dim) * other.stride(dim);
        rest /= view.size(dim);
      }
      return offset;
    });
  }
}

// On the CPU a stream is immediate.
class HostOperations final : public LocalOperations {
 public:
  void combine(std::span<const PartialState> parts, const SoftmaxState& result, SoftmaxForm form,
               Stream& /*stream*/) const override {
    annulus::combine(parts, result, form);
  }
  void sum(std::span<const ConstTensorView> parts, const TensorView& result,
           Stream& /*stream*/) const override {
    for (const ConstTensorView& part : parts) {
      if (!(part.shape() == result.shape())) throw InternalError("a sum of different shapes");
    }
    if (result.elements() == 0) return;
    const std::int64_t width = result.size(result.rank() - 1);
    std::vector<const float*> from(parts.size());
    for_each_row(result, [&](const auto& offset_in) {
      for (std::size_t p = 0; p < parts.size(); ++p) {
        from[p] = parts[p].as<float>() + offset_in(parts[p]);
      }
      float* const to = result.as<float>() + offset_in(result);
      for (std::int64_t i = 0; i < width; ++i) {
        float total = 0;
        for (const float* part : from) total += part[i];
        to[i] = total;
      }
    });
  }
  void publish(std::int32_t /*value*/, std::int32_t* /*number*/,
               Stream& /*stream*/) const override {
    throw InternalError("no CPU kernel awaits columns");
  }
};

}  // namespace

std::unique_ptr<LocalOperations> make_local_operations(Place place) {
  if (!place.is_host()) return make_cuda_operations();
  return std::make_unique<HostOperations>();
}

}  // namespace annulus::ring
