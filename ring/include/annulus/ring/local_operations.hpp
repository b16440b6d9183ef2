#pragma once

#include <memory>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::ring {

/// The elementwise work that the executor does around the kernels, on one kind of memory. Every
/// call is ordered by its stream.
class LocalOperations {
 public:
  virtual ~LocalOperations() = default;
  /// See softmax_state.hpp for the first four.
  virtual void reset(const SoftmaxState& state, Stream& stream) const = 0;
  virtual void merge(const SoftmaxState& state, const SoftmaxState& partial,
                     Stream& stream) const = 0;
  virtual void round_output(const SoftmaxState& state, const TensorView& output,
                            Stream& stream) const = 0;
  virtual void round_lse(const SoftmaxState& state, const TensorView& lse,
                         Stream& stream) const = 0;
  virtual void copy(const ConstTensorView& source, const TensorView& destination,
                    Stream& stream) const = 0;
};

/// For tensors at `place`. Throws NotAvailableError for a place that this build cannot serve.
[[nodiscard]] std::unique_ptr<LocalOperations> make_local_operations(Place place);

}  // namespace annulus::ring
