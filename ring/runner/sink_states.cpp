#include "runner/sink_states.hpp"

#include <algorithm>

namespace annulus::ring {

SinkStates::SinkStates(const AttentionProblem& problem, const RankPlan& plan, Device& device,
                       const LocalOperations& operations, Stream& stream) {
  const Sinks& sinks = problem.sinks.value();
  HostMemoryPool host;
  Tensor zeros(partial_dtype(problem.dtype), {plan.local.value_dim}, host);
  zeros.fill_zero();
  const std::int64_t heads = sinks.shape().rank() == 1 ? 1 : plan.local.heads;
  const Tensor logits(DType::float32, {heads, sinks.per_head()}, host);
  for (std::int64_t head = 0; head < heads; ++head) {
    std::ranges::copy(sinks.of_head(plan.first_head + head),
                      logits.view().as<float>() + head * sinks.per_head());
  }
  const auto to_device = [&](const Tensor& tensor) {
    Tensor copy(tensor.dtype(), tensor.shape(), device.memory());
    device.copy(tensor.view(), copy.view(), stream);
    return copy;
  };
  const auto current = device.make_current();
  zeros_ = to_device(zeros);
  own_ = to_device(logits);
  logits_ = Tensor(DType::float32, logits.shape(), device.memory());
  // As precise as the LSEs that the sinks are merged with. A GPU is fastest if all have one dtype.
  const bool wide = device.place().is_host() || partial_dtype(problem.dtype) == problem.dtype;
  const Extents of_heads{plan.local.heads};
  lse_ = Tensor(wide ? DType::float64 : DType::float32, of_heads, device.memory());
  if (!problem.normalize_output) maximum_ = Tensor(DType::float32, of_heads, device.memory());
  set({}, true, operations, stream);
  stream.synchronize();
}

void SinkStates::set(const ConstTensorView& sinks, bool captured, const LocalOperations& operations,
                     Stream& stream) {
  const bool own = sinks.rank() == 0;
  if (own && holds_own_ && !captured) return;
  const TensorView maximum = maximum_.shape().rank() > 0 ? maximum_.view() : TensorView();
  operations.sink_state(own ? ConstTensorView(own_.view()) : sinks, logits_.view(), lse_.view(),
                        maximum, stream);
  // Nobody tells when a graph with other sinks is launched.
  graphs_write_others_ |= captured && !own;
  holds_own_ = own && !graphs_write_others_;
}

PartialState SinkStates::part(HeadRange heads, const Extents& output, DType dtype) const {
  const TensorView zeros = zeros_.view();
  const auto of_rows = [&](const Tensor& tensor) -> TensorView {
    if (tensor.shape().rank() == 0) return {};
    const TensorView of_heads = tensor.view().slice(0, heads.begin, heads.count);
    return {of_heads.data(),
            of_heads.dtype(),
            {output[0], output[2], output[1]},
            {0, 1, 0},
            of_heads.place()};
  };
  return {{{zeros.data(), dtype, output, {0, 0, 0, 1}, zeros.place()},
           of_rows(lse_),
           of_rows(maximum_)}};
}

}  // namespace annulus::ring
