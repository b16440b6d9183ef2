#include "calls/call_tensors.hpp"

#include <annulus/core/error.hpp>

namespace annulus::ring {
namespace {

// The runner only reads its inputs.
TensorView writable(const ConstTensorView& view) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  return {const_cast<void*>(view.data()), view.dtype(), view.shape(), view.strides(), view.place()};
}

constexpr const char* kNoLse = "none with normalize_output = false: the LSE is maximum + log(sum)";
constexpr const char* kNoSum = "none: the output is normalised";

void add_if(std::vector<CallTensor>& named, Content content, const char* name,
            const ConstTensorView& tensor, bool wanted,
            const char* expected = "none: the problem has none") {
  if (wanted) {
    named.push_back({content, writable(tensor)});
  } else if (tensor.rank() > 0) {
    throw ArgumentError(name, "a tensor of shape " + to_string(tensor.shape()), expected);
  }
}

// [n,M], or [M], as [1,1,n,M]: see Content::grad_sinks.
TensorView in_one_token(const TensorView& sinks) {
  const bool shared = sinks.rank() == 1;
  if (sinks.rank() != 2 && !shared) return sinks;
  const Extents shape{1, 1, shared ? 1 : sinks.size(0), sinks.size(shared ? 0 : 1)};
  const std::int64_t head = shared ? shape[3] : sinks.stride(0);
  const std::int64_t token = shape[2] * head;
  return {sinks.data(),
          sinks.dtype(),
          shape,
          {token, token, head, sinks.stride(shared ? 0 : 1)},
          sinks.place()};
}

}  // namespace

std::vector<CallTensor> by_content(const LocalTensors& tensors, const AttentionProblem& problem) {
  std::vector<CallTensor> named{{Content::query, writable(tensors.query)},
                                {Content::key, writable(tensors.key)},
                                {Content::value, writable(tensors.value)},
                                {Content::output, tensors.output}};
  const bool normalised = problem.normalize_output;
  add_if(named, Content::lse, "LSE", tensors.lse, normalised, kNoLse);
  add_if(named, Content::sum, "sum", tensors.sum, !normalised, kNoSum);
  add_if(named, Content::bias, "bias", tensors.bias, problem.bias.has_value());
  add_if(named, Content::dense_mask, "mask", tensors.mask, problem.dense_mask.has_value());
  add_if(named, Content::maximum, "maximum", tensors.maximum, !normalised, kNoSum);
  return named;
}

std::vector<CallTensor> by_content(const BackwardLocalTensors& tensors,
                                   const AttentionProblem& problem,
                                   const BackwardRequest& request) {
  std::vector<CallTensor> named{{Content::query, writable(tensors.query)},
                                {Content::key, writable(tensors.key)},
                                {Content::value, writable(tensors.value)},
                                {Content::output, writable(tensors.output)},
                                {Content::lse, writable(tensors.lse)},
                                {Content::grad_output, writable(tensors.grad_output)},
                                {Content::grad_query, tensors.grad_query},
                                {Content::grad_key, tensors.grad_key},
                                {Content::grad_value, tensors.grad_value}};
  add_if(named, Content::bias, "bias", tensors.bias, problem.bias.has_value());
  add_if(named, Content::dense_mask, "mask", tensors.mask, problem.dense_mask.has_value());
  add_if(named, Content::grad_lse, "grad LSE", tensors.grad_lse, request.grad_lse,
         "none: the plan is for an LSE without a gradient");
  add_if(named, Content::grad_sinks, "grad sinks", in_one_token(tensors.grad_sinks),
         request.grad_sinks, "none: the plan is for calls without it");
  add_if(named, Content::grad_bias, "grad bias", tensors.grad_bias, request.grad_bias,
         "none: the plan is for calls without it");
  return named;
}

}  // namespace annulus::ring
