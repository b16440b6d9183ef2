#pragma once

#include <cstdint>
#include <optional>

#include <annulus/core/device.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

#include "flash/backward/arguments.hpp"

namespace annulus::flash::backward {

/// A block of one straight band: a row sees a column if low <= column position − row position
/// <= high. Without a bound there is none on that side.
struct Band {
  Positions rows, columns;
  std::optional<std::int64_t> low, high;
};

/// Tensors of a backward call. Query, key, value, output and grad_output have one half type and
/// shapes [batch, sequence, head, dim]; LSE and grad_lse are contiguous float32
/// [batch, head, row]. LSE and output are those of the whole attention, whatever the block.
struct BackwardInputs {
  ConstTensorView query, key, value, output, grad_output, lse;
  std::optional<ConstTensorView> grad_lse;
};

/// Gradients of a block: in the inputs' type, overwritten, or in float32. `add`: added to what is
/// there, which must be float32.
struct BackwardResult {
  TensorView grad_query, grad_key, grad_value;
  bool add = false;
};

/// The backward pass on a device of compute capability 9.0, for head dimensions 64 and 128, the
/// value dimension equal. Keeps its temporaries on the device. One call at a time.
class FlashBackward {
 public:
  /// The device must outlive it.
  explicit FlashBackward(Device& device) : device_(device) {}

  /// Ordered by `stream`. Rows whose LSE is −∞ get no gradient and give none. Throws InternalError
  /// for tensors that it does not take.
  void run(const BackwardInputs& inputs, const Band& band, float scale,
           const BackwardResult& result, Stream& stream);

 private:
  Device& device_;
  Tensor rows_;       // LSE and delta
  Tensor query_sum_;  // dQ before its conversion
};

}  // namespace annulus::flash::backward
