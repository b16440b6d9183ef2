#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/device.hpp>
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
  int threads = 1;               ///< CPU threads that the call may use
};

/// A local attention kernel made ready for one problem and one device: it may hold plans, workspace
/// and copies of the mask there. One kernel serves one executor, one call at a time.
class Kernel {
 public:
  virtual ~Kernel() = default;
  Kernel() = default;
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  /// The dtype in which outputs are handed over: float32, or the problem's where the kernel of a
  /// device rounds to it.
  [[nodiscard]] virtual DType output_dtype() const { return DType::float32; }
  /// Does once what a block of this geometry with a result of these strides needs (building a plan,
  /// taking workspace), so that forward() allocates and waits for nothing. Of the tensors'
  /// addresses only the alignment matters. Throws UnsupportedError when only this shows that it
  /// cannot: the block then goes to another implementation.
  virtual void prepare(const AttentionBlock& /*block*/, const SoftmaxState& /*result*/) {}
  /// Computes the softmax state of `block` over its columns alone, overwriting `result`: output
  /// [b,t,n,Dv] of output_dtype() and LSE [b,n,t], float32, or float64 where the output is float32.
  /// Rows that see no column get (0, −∞). Ordered by context.stream.
  virtual void forward(const AttentionBlock& block, const SoftmaxState& result,
                       const ExecutionContext& context) = 0;
};

/// A way to compute attention locally. Stateless: one object serves all problems and threads.
class Implementation {
 public:
  virtual ~Implementation() = default;
  /// The name and its aliases, the name first.
  [[nodiscard]] virtual const std::vector<std::string>& names() const noexcept = 0;
  /// Whether some blocks of the problem can run here.
  [[nodiscard]] virtual Capability capability(const AttentionProblem& problem,
                                              Place place) const = 0;
  /// Whether this block of such a problem can: its positions, shapes and strides count, and how
  /// well its addresses are aligned.
  [[nodiscard]] virtual Capability block_capability(const AttentionProblem& /*problem*/,
                                                    const AttentionBlock& /*block*/) const {
    return Capability::yes();
  }
  /// A kernel for a problem that it is capable of: `problem` gives dtype, scale, cap and mask; its
  /// shape is the whole one. It and `device` must outlive the kernel.
  [[nodiscard]] virtual std::unique_ptr<Kernel> make_kernel(const AttentionProblem& problem,
                                                            Device& device) const = 0;
};

}  // namespace annulus
