#include "runner/sink_states.hpp"

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
  const auto current = device.make_current();
  zeros_ = Tensor(zeros.dtype(), zeros.shape(), device.memory());
  lse_ = Tensor(lse.dtype(), lse.shape(), device.memory());
  device.copy(zeros.view(), zeros_.view(), stream);
  device.copy(lse.view(), lse_.view(), stream);
  stream.synchronize();
}

PartialState SinkStates::part(HeadRange heads, const Extents& output, DType dtype) const {
  const TensorView zeros = zeros_.view();
  const TensorView lse = lse_.view().slice(0, heads.begin, heads.count);
  return {{{zeros.data(), dtype, output, {0, 0, 0, 1}, zeros.place()},
           {lse.data(), lse.dtype(), {output[0], output[2], output[1]}, {0, 1, 0}, lse.place()}}};
}

}  // namespace annulus::ring
