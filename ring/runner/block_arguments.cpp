#include "runner/block_arguments.hpp"

#include <optional>

namespace annulus::ring {

AttentionBlock BlockArguments::of(std::size_t index, const Block& block) const {
  const HeadRange kv_heads = plan_.kv_heads_of(block.heads);
  std::optional<SoftmaxState> state;
  if (block.state) state = memory_.state(*block.state);
  return {memory_.view({block.query, block.rows, block.heads, block.batches}, Content::query),
          memory_.view({block.key, block.columns, kv_heads, block.batches}, Content::key),
          memory_.view({block.value, block.columns, kv_heads, block.batches}, Content::value),
          block.row_positions,
          block.column_positions,
          plan_.first_batch + block.batches.begin,
          plan_.first_head + block.heads.begin,
          block.full,
          state,
          memory_.scores(block, kv_length_),
          arrivals_.number_of(index),
          call_arguments_};
}

annulus::BackwardBlock BlockArguments::of(const BackwardBlock& block) const {
  const HeadRange kv_heads = plan_.kv_heads_of(block.heads);
  const auto rows_of = [&](int buffer, Content content) {
    return memory_.view({buffer, block.rows, block.heads, block.batches}, content);
  };
  return {rows_of(block.query, Content::query),
          memory_.view({block.key, block.columns, kv_heads, block.batches}, Content::key),
          memory_.view({block.value, block.columns, kv_heads, block.batches}, Content::value),
          rows_of(block.grad_output, Content::grad_output),
          rows_of(block.lse, Content::lse),
          rows_of(block.delta, Content::delta),
          block.row_positions,
          block.column_positions,
          plan_.first_batch + block.batches.begin,
          plan_.first_head + block.heads.begin,
          block.full,
          memory_.scores(block, kv_length_),
          call_arguments_,
          block.repeats_bits};
}

Gradients BlockArguments::gradients_of(const BackwardBlock& block) const {
  Gradients gradients{memory_.view(block.grad_query, Content::grad_query),
                      memory_.view(block.grad_key, Content::grad_key),
                      memory_.view(block.grad_value, Content::grad_value)};
  if (block.grad_bias.buffer >= 0) {
    const TensorView bias = memory_.view(block.grad_bias, Content::grad_bias);
    const ConstTensorView wide =
        broadcast_to(bias, {block.batches.count, block.heads.count, block.rows.count, kv_length_});
    gradients.bias = {bias.data(), wide.dtype(), wide.shape(), wide.strides(), wide.place()};
  }
  return gradients;
}

}  // namespace annulus::ring
