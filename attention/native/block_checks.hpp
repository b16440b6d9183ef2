#pragma once

#include <string>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/error.hpp>

// Checks of blocks that only a defect of the caller fails, forward and backward.
namespace annulus {

inline void check(bool fits, const char* what) {
  if (!fits) throw InternalError(std::string("native attention: ") + what);
}

[[nodiscard]] inline bool has_unit_stride(const ConstTensorView& tensor) {
  return tensor.size(3) == 1 || tensor.stride(3) == 1;
}

/// Checks shapes and strides of query, key, value, positions and scores against each other.
inline void check_operands(const AttentionProblem& problem, const AttentionBlock& block) {
  const Extents& query = block.query.shape();
  const Extents& key = block.key.shape();
  const Extents& value = block.value.shape();
  check(query.rank() == 4 && key.rank() == 4 && value.rank() == 4, "tensors must have rank 4");
  check(key == Extents{query[0], key[1], key[2], query[3]}, "key does not fit query");
  check(value == Extents{key[0], key[1], key[2], value[3]}, "value does not fit key");
  check(key[2] > 0 && query[2] % key[2] == 0, "query heads are no multiple of key/value heads");
  check(block.rows.size() == query[1], "row positions do not fit query");
  check(block.columns.size() == key[1], "column positions do not fit key");
  for (const ConstTensorView* tensor : {&block.query, &block.key, &block.value}) {
    check(has_unit_stride(*tensor), "head dimension has a stride");
  }
  block.scores.check(problem, query, block.columns.size());
}

}  // namespace annulus
