#include "runner/local_tasks.hpp"

#include <vector>

namespace annulus::ring {

void LocalTasks::submit(const Reduce& reduce) const {
  if (reduce.reduction == Reduction::softmax) {
    std::vector<PartialState> parts;
    for (const Result& part : reduce.parts) {
      parts.push_back({memory_.state(part),
                       part.output.tokens.begin - reduce.into.output.tokens.begin,
                       part.output.heads.begin - reduce.into.output.heads.begin});
    }
    const SoftmaxState into = memory_.state(reduce.into);
    if (reduce.sinks) {
      parts.push_back(sinks_->part(
          reduce.into.output.heads, into.output.shape(),
          parts.empty() ? partial_dtype(into.output.dtype()) : parts.front().state.output.dtype()));
    }
    operations_.combine(parts, into,
                        reduce.unnormalised ? SoftmaxForm::unnormalised : SoftmaxForm::normalised,
                        stream_);
  } else {
    for (const Content content : plan_.buffer(reduce.into.output.buffer).contents) {
      std::vector<ConstTensorView> parts;
      for (const Result& part : reduce.parts) {
        parts.emplace_back(memory_.view(part.output, content));
      }
      operations_.sum(parts, memory_.view(reduce.into.output, content), stream_);
    }
  }
}

void LocalTasks::submit(const Delta& delta) const {
  const auto rows_of = [&](int buffer, Content content) {
    return memory_.view(delta.output.in(buffer), content);
  };
  operations_.delta(
      memory_.view(delta.output, Content::output), rows_of(delta.grad_output, Content::grad_output),
      rows_of(delta.grad_lse, Content::grad_lse), rows_of(delta.delta, Content::delta), stream_);
}

void LocalTasks::submit(const SinkGradient& gradient) const {
  operations_.sink_gradient(
      sinks_->logits(), memory_.view(gradient.delta.in(gradient.lse), Content::lse),
      memory_.view(gradient.delta, Content::delta),
      memory_.view(plan_.whole(gradient.grad_sinks), Content::grad_sinks), stream_);
}

}  // namespace annulus::ring
