#pragma once

#include <initializer_list>

#include <annulus/attention/implementation.hpp>

namespace annulus {

/// Checks of blocks. They throw InternalError, since only a defect of the caller makes one fail.
class BlockChecks {
 public:
  /// Errors begin with `who`, such as "native attention".
  BlockChecks(const char* who, const AttentionProblem& problem) : who_(who), problem_(problem) {}

  /// A block of the forward pass and its result, whose output is float32 or of the problem's dtype
  /// and whose LSE is float32 or float64.
  void check(const AttentionBlock& block, const SoftmaxState& result) const;
  /// A block of the backward pass and its gradients.
  void check(const BackwardBlock& block, const Gradients& gradients) const;
  /// A requirement of one implementation.
  void require(bool fits, const char* what) const;
  void require_unit_strides(std::initializer_list<ConstTensorView> tensors) const;

 private:
  void check_operands(const AttentionBlock& block) const;
  // The error names `tensor`.
  void require(bool fits, const char* name, const ConstTensorView& tensor) const;

  const char* who_;
  const AttentionProblem& problem_;
};

}  // namespace annulus
