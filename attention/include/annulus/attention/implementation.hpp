#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/partition/position.hpp>

namespace annulus {

/// "Can you run this problem here?": yes, or the reason why not.
class Capability {
 public:
  static Capability yes() { return Capability({}); }
  static Capability no(std::string reason) { return Capability(std::move(reason)); }
  explicit operator bool() const noexcept { return reason_.empty(); }
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }

 private:
  explicit Capability(std::string reason) : reason_(std::move(reason)) {}
  std::string reason_;
};

/// One local call: some rows of the problem against some of its columns. Strides are free except
/// that the head dimensions are innermost with stride 1.
struct AttentionBlock {
  ConstTensorView query;   ///< [b,t,n,D]
  ConstTensorView key;     ///< [b,s,k,D]
  ConstTensorView value;   ///< [b,s,k,Dv]
  PositionRanges rows;     ///< global positions of the t rows
  PositionRanges columns;  ///< global positions of the s columns
  /// Global indices of the first batch and the first query head. The n query heads are spread
  /// evenly over the k key/value heads: local head i reads local key/value head i / (n/k).
  std::int64_t first_batch = 0;
  std::int64_t first_head = 0;
  bool unmasked = false;  ///< the plan found every pair visible; the mask need not be asked
};

/// What a local call runs on.
struct ExecutionContext {
  Stream& stream;                ///< the work is submitted here
  Stream* background = nullptr;  ///< moved along while a CPU kernel runs; may be null
  MemoryPool& memory;            ///< for workspace, of the stream's place
  int threads = 1;               ///< CPU threads that the call may use
};

/// A local attention kernel. Stateless: one object serves all problems and threads.
class Implementation {
 public:
  virtual ~Implementation() = default;
  /// The name and its aliases, the name first.
  [[nodiscard]] virtual const std::vector<std::string>& names() const noexcept = 0;
  [[nodiscard]] virtual Capability capability(const AttentionProblem& problem,
                                              Place place) const = 0;
  /// Computes the softmax state of `block` over its columns alone, overwriting `result` ([b,t,n,Dv]
  /// and [b,n,t], the LSE float32 or float64). `problem` gives dtype, scale, cap and mask; its
  /// shape is the whole one. Rows that see no column get (0, −∞). Ordered by context.stream. Throws
  /// InternalError for a block whose shapes do not fit together.
  virtual void forward(const AttentionProblem& problem, const AttentionBlock& block,
                       const SoftmaxState& result, const ExecutionContext& context) const = 0;
};

}  // namespace annulus
