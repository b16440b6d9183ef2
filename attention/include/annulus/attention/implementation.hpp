#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <annulus/attention/features.hpp>
#include <annulus/attention/problem.hpp>
#include <annulus/attention/problem_class.hpp>
#include <annulus/attention/score_tensors.hpp>
#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus {

/// The answer to "can you run this problem here?": yes, or the reason why not.
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

/// Device memory from which running kernels read the values that AttentionProblem::call_arguments
/// names, so that recorded calls serve other values. A null pointer means the problem's value. The
/// first three are [B], by global batch.
struct CallArgumentArrays {
  const std::int32_t* query_lengths = nullptr;  ///< 0 to T
  const std::int32_t* kv_lengths = nullptr;     ///< 0 to S
  const std::int32_t* offsets = nullptr;
  const std::uint32_t* dropout_key = nullptr;  ///< philox_key() of the seed, two words
};

/// One local call: some rows of the problem against some of its columns. The innermost dimension of
/// every tensor has stride 1; the other strides are free.
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
  bool unmasked = false;  ///< every pair is visible by plan, so the mask can be skipped, but
                          ///< not the dense mask
  /// The softmax state of these rows over other columns, float32, which the result then includes.
  /// It may share the result's memory.
  std::optional<SoftmaxState> state = {};
  ScoreTensors scores = {};  ///< bias and dense mask of these batches, heads and rows
  /// An index into `columns`, in device memory: columns from this index on have arrived; earlier
  /// ones arrive while the kernel runs, from last to first. Null: all have arrived. Only for
  /// implementations that await columns.
  const std::int32_t* arrived_from = nullptr;
  CallArgumentArrays call_arguments = {};  ///< only for kernels of devices
};

/// One local call of the backward pass: the same rows, columns and conventions as an
/// AttentionBlock. `lse` and `delta` are of whole rows, over all columns and sinks, so the
/// gradients of different blocks can be added.
struct BackwardBlock {
  ConstTensorView query;        ///< [b,t,n,D]
  ConstTensorView key;          ///< [b,s,k,D]
  ConstTensorView value;        ///< [b,s,k,Dv]
  ConstTensorView grad_output;  ///< [b,t,n,Dv], of the problem's dtype
  ConstTensorView lse;          ///< [b,n,t], float32, or float64 if the problem is
  ConstTensorView delta;        ///< likewise: rowsum(dO ∘ O) − dLSE
  PositionRanges rows;          ///< global positions of the t rows
  PositionRanges columns;       ///< global positions of the s columns
  std::int64_t first_batch = 0;
  std::int64_t first_head = 0;
  bool unmasked = false;
  ScoreTensors scores = {};
  CallArgumentArrays call_arguments = {};
  /// The gradients must have the same bits every time. Only if the implementation declares that it
  /// can.
  bool repeats_bits = false;
};

/// The forward block of the same rows and columns.
[[nodiscard]] inline AttentionBlock forward_of(const BackwardBlock& block) {
  AttentionBlock forward{block.query, block.key, block.value, block.rows, block.columns};
  forward.first_batch = block.first_batch;
  forward.first_head = block.first_head;
  forward.unmasked = block.unmasked;
  forward.scores = block.scores;
  forward.call_arguments = block.call_arguments;
  return forward;
}

/// Gradients that a call adds to; float32, or float64 if the problem is. The innermost dimension of
/// each has stride 1. Without dimensions: not wanted.
struct Gradients {
  TensorView query = {};  ///< [b,t,n,D]
  TensorView key = {};    ///< [b,s,k,D]: summed over the query heads that read a key/value head
  TensorView value = {};  ///< [b,s,k,Dv], likewise
  /// [b,n,t,S], or [b,n,t,s] if the block's scores are by column. Broadcast dimensions have stride
  /// 0, so contributions to one entry are summed.
  TensorView bias = {};
};

/// A block without its tensors: for planning.
struct BlockGeometry {
  PositionRanges rows;     ///< global positions
  PositionRanges columns;  ///< likewise
  std::int64_t first_batch = 0;
  std::int64_t batches = 0;
  bool unmasked = false;
  bool repeats_bits = false;  ///< see BackwardBlock
};

[[nodiscard]] inline BlockGeometry geometry_of(const AttentionBlock& block) {
  return {block.rows, block.columns, block.first_batch, block.query.size(0), block.unmasked};
}

/// The streams and threads of a local call.
struct ExecutionContext {
  Stream& stream;                ///< the work is submitted here
  Stream* background = nullptr;  ///< advanced while a CPU kernel runs; may be null
  int threads = 1;               ///< CPU threads that the call may use
};

/// A local attention kernel prepared for one problem and one device, where it may hold plans,
/// workspace and copies of the mask. One kernel serves one runner, one call at a time.
class Kernel {
 public:
  virtual ~Kernel() = default;
  Kernel() = default;
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  /// Prepares for blocks of this geometry with results of these strides (builds a plan, takes
  /// workspace), so that forward() neither allocates nor waits. Only the alignment of the tensors'
  /// addresses matters. Throws UnsupportedError if the kernel finds only now that it cannot compute
  /// the block, which then goes to another implementation.
  virtual void prepare(const AttentionBlock& /*block*/, const SoftmaxState& /*result*/) {}
  /// Computes the softmax state of `block` over its columns, and over the columns of block.state if
  /// there is one, overwriting `result`: output [b,t,n,Dv] of a dtype that the implementation
  /// declares, and LSE [b,n,t], float32, or float64 if the output is float32. Rows that see no
  /// column get (0, −∞). An implementation with Feature::unnormalised also writes result.maximum,
  /// if wanted; block.state then has a maximum too. Ordered by context.stream.
  virtual void forward(const AttentionBlock& block, const SoftmaxState& result,
                       const ExecutionContext& context) = 0;
  /// Prepares for backward() with blocks of this geometry and gradients of these strides, as
  /// prepare() does for forward(), with the same error.
  virtual void prepare_backward(const BackwardBlock& /*block*/, const Gradients& /*gradients*/) {}
  /// Adds the gradients of `block` (docs/semantics.md §1, "Gradients") to `gradients`. Rows whose
  /// LSE is −∞ add nothing. Ordered by context.stream. Only for implementations that declare it.
  virtual void backward(const BackwardBlock& block, const Gradients& gradients,
                        const ExecutionContext& context);
};

/// The blocks that an implementation takes.
enum class BlockForm : std::uint8_t {
  any,      ///< any positions of rows and columns
  straight  ///< only masks that are one straight band, with a length per batch (see LocalMask)
};

/// The dtype of an implementation's results.
enum class ResultForm : std::uint8_t {
  float32,
  rounded,  ///< the problem's dtype
  either    ///< as asked for
};

/// The features that an implementation honours in the backward pass.
struct BackwardDeclaration {
  FeatureSet features;
  BlockForm blocks = BlockForm::any;
  /// True if gradients have the same bits every time when BackwardBlock::repeats_bits asks for it.
  bool repeats_bits = true;
  bool rounds = false;  ///< rounds a block's gradients to the problem's dtype before it adds them
  bool takes_grad_lse = true;  ///< delta need not be rowsum(dO ∘ O): an LSE may have a gradient
  bool sums_bias_over_keys = true;  ///< the gradient of a bias that all keys of a row share
  /// Like repeats_bits, for the gradient of a bias that batches, heads or rows share.
  bool repeats_bias_sums = true;
  /// True if one multiprocessor computes a tile of keys for all query heads of a key/value head.
  bool joins_query_heads = false;
  /// Like Declaration::reproducible_rows, for gradients: the gradients of a column have the same
  /// bits if columns are cut only at multiples of this, and rows are not cut. 0: never. The
  /// gradients of a block's rows then do not depend on whether the gradients of its columns are
  /// computed too, and vice versa.
  std::int64_t reproducible_columns = 0;
};

/// The features that an implementation honours, and the form of its results.
struct Declaration {
  FeatureSet features;
  BlockForm blocks = BlockForm::any;
  ResultForm results = ResultForm::float32;
  bool continues_state = false;  ///< see AttentionBlock::state
  /// `auto` takes it only for problems that ask for one of these features; empty: for any problem.
  FeatureSet meant_for = {};
  /// Its kernels compute whole tiles of this many rows; fewer rows take as long.
  std::int64_t row_tile = 1;
  std::optional<BackwardDeclaration> backward = {};  ///< absent: it computes no gradients
  /// For problems with the same bits on any number of ranks: the bits of a row do not depend on the
  /// block's other batches, heads and rows if rows are cut only at multiples of this global
  /// position, and columns are not cut. 0: the bits depend on more.
  std::int64_t reproducible_rows = 0;
};

/// The blocks that an implementation gives to a kernel for few query rows. All columns must have
/// arrived, and all pairs must be visible, unless `banded`. Other kernels give a tile of rows of
/// one head to one multiprocessor. The kernel for few rows computes the rows of all query heads of
/// a key/value head together and spreads their keys over the whole device, so it mostly takes as
/// long as reading the keys.
struct FewRows {
  std::int64_t most = 0;    ///< query rows times query heads of a key/value head; 0: no such kernel
  std::int64_t always = 0;  ///< more rows than this count as few only if there are few tiles:
  std::int64_t tiles = 0;   ///< fewer than this, one for each query head
  std::int64_t columns = 0;  ///< for each row, at the least
  double rate = 0;           ///< assumed operations per second if rows are not so few
  /// Pairs may also be hidden by one straight band and a length per batch (see LocalMask).
  bool banded = false;

  /// True for a block of `heads` query heads over all its batches, whose rows see this many columns
  /// each, on average.
  [[nodiscard]] constexpr bool include(std::int64_t query_rows, std::int64_t heads_per_kv_head,
                                       std::int64_t heads, std::int64_t block_columns) const {
    const std::int64_t rows = query_rows * heads_per_kv_head;
    return rows <= most && (rows <= always || heads < tiles) && block_columns >= columns * rows;
  }
  bool operator==(const FewRows&) const = default;
};

/// A way to compute attention locally. Stateless: one object serves all problems and threads.
///
/// Its declaration, accepts() and takes() depend only on their arguments, so that plans can be made
/// for other machines; only available() examines this machine.
class Implementation {
 public:
  virtual ~Implementation() = default;
  /// The name and its aliases, the name first.
  [[nodiscard]] virtual const std::vector<std::string>& names() const noexcept = 0;
  [[nodiscard]] virtual const Declaration& declares() const noexcept = 0;
  /// The name for measured rates, shared by implementations with the same kernel.
  [[nodiscard]] virtual const std::string& kernel_name() const noexcept { return names().front(); }
  /// True if it computes problems of these dtypes and sizes at this kind of place, apart from
  /// declared features.
  [[nodiscard]] virtual Capability accepts(const AttentionProblem& problem, Place place) const = 0;
  /// accepts() for the gradients, if it declares a backward pass.
  [[nodiscard]] virtual Capability accepts_backward(const AttentionProblem& problem,
                                                    Place place) const {
    return accepts(problem, place);
  }
  /// True if this build and this machine can run it.
  [[nodiscard]] virtual Capability available(Place place) const = 0;
  /// True if it can compute this block of a problem that it accepts. Kernel::prepare may still
  /// refuse the block for its strides or addresses.
  [[nodiscard]] virtual Capability takes(const AttentionProblem& /*problem*/,
                                         const BlockGeometry& /*block*/) const {
    return Capability::yes();
  }
  /// takes() for the block's gradients, of a problem whose gradients it accepts.
  [[nodiscard]] virtual Capability takes_backward(const AttentionProblem& problem,
                                                  const BlockGeometry& block) const {
    return takes(problem, block);
  }
  /// True if this block gets the same bits every time. If not, the implementation computes the
  /// block only if it was named.
  [[nodiscard]] virtual bool repeats_bits(const BlockGeometry& /*block*/) const { return true; }
  /// True if its kernels can wait for columns that arrive while they run: see
  /// AttentionBlock::arrived_from.
  [[nodiscard]] virtual bool awaits_columns(const AttentionProblem& /*problem*/) const {
    return false;
  }
  [[nodiscard]] virtual FewRows few_rows(const AttentionProblem& /*problem*/) const { return {}; }
  /// Assumed operations per second of one CPU core or one GPU if nothing was measured; positive,
  /// and meaningless for a pass that it does not compute. The backward pass has 2 (3 D + 2 Dv)
  /// operations per pair and head. For CPUs it may examine this machine.
  [[nodiscard]] virtual double assumed_rate(const ProblemClass& problem, Place place) const = 0;
  /// A kernel for a problem for which capability() is yes. `problem` is the whole, unsharded
  /// problem. It and `device` must outlive the kernel. Between calls, lengths, offsets and seed may
  /// change if problem.call_arguments names them; device kernels read them from the block's arrays.
  [[nodiscard]] virtual std::unique_ptr<Kernel> make_kernel(const AttentionProblem& problem,
                                                            Device& device) const = 0;

  /// True if it could compute the problem at this kind of place, by its declaration and accepts().
  [[nodiscard]] Capability fits(const AttentionProblem& problem, Place place) const;
  /// The same for the problem's gradients.
  [[nodiscard]] Capability fits_backward(const AttentionProblem& problem, Place place) const;
  /// True if it can compute the problem here.
  [[nodiscard]] Capability capability(const AttentionProblem& problem, Place place) const;
};

}  // namespace annulus
