#include "runner/sink_states.hpp"

#include <algorithm>

namespace annulus::ring {

SinkStates::SinkStates(const AttentionProblem& problem, const RankPlan& plan, Device& device,
                       Stream& stream) {
  if (!problem.sinks) return;
  HostMemoryPool host;
  Tensor zeros(partial_dtype(problem.dtype), {plan.local.value_dim}, host);
  zeros.fill_zero();
  // As precise as the LSEs that it is merged with. A GPU is fastest if all have one dtype.
  const bool wide = device.place().is_host() || partial_dtype(problem.dtype) == problem.dtype;
  const Tensor lse(wide ? DType::float64 : DType::float32, {plan.local.heads}, host);
  for (std::int64_t head = 0; head < plan.local.heads; ++head) {
    const double value = problem.sinks->lse(plan.first_head + head);
    if (wide) {
      lse.view().as<double>()[head] = value;
    } else {
      lse.view().as<float>()[head] = static_cast<float>(value);
    }
  }
  const auto to_device = [&](const Tensor& tensor) {
    Tensor copy(tensor.dtype(), tensor.shape(), device.memory());
    device.copy(tensor.view(), copy.view(), stream);
    return copy;
  };
  const auto current = device.make_current();
  zeros_ = to_device(zeros);
  lse_ = to_device(lse);
  if (plan.sinks_per_head > 0) {
    const std::int64_t heads = problem.sinks->shape().rank() == 1 ? 1 : plan.local.heads;
    const Tensor logits(DType::float32, {heads, plan.sinks_per_head}, host);
    for (std::int64_t head = 0; head < heads; ++head) {
      std::ranges::copy(problem.sinks->of_head(plan.first_head + head),
                        logits.view().as<float>() + head * plan.sinks_per_head);
    }
    logits_ = to_device(logits);
  }
  const Tensor maximum(DType::float32, lse.shape(), host);
  if (!problem.normalize_output) {
    for (std::int64_t head = 0; head < plan.local.heads; ++head) {
      maximum.view().as<float>()[head] =
          std::ranges::max(problem.sinks->of_head(plan.first_head + head));
    }
    maximum_ = to_device(maximum);
  }
  stream.synchronize();
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
