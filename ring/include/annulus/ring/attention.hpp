#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/sharded_operands.hpp>
#include <annulus/ring/tuning.hpp>

namespace annulus {

class Implementation;
struct Selection;
class Tracer;

namespace ring {
struct CostModel;
struct PlanInput;
class ShardedAttention;
}  // namespace ring

/// Makes the bias where neither a mask nor a bias is given.
struct InitBias {
  Extents shape;  ///< of the whole bias: each dimension is 1 or that of [B,N,T,S]
  /// Fills a rank's part, a contiguous float32 host tensor. `index` gives the global positions that
  /// the part holds along each dimension. The function must not call MPI.
  std::function<void(const TensorView& part, std::span<const PositionRanges> index)> fill;
};

/// Choices for the backward pass. An empty field falls back to the forward pass's Choice, then to
/// "auto".
struct BackwardChoice {
  std::string implementation = {};
  std::string schedule = {};
  /// The dtype of incomplete gradients of keys and values on their way to their owners: float32, or
  /// bfloat16 for a problem of a half type. See ring::PlanOptions::grad_wire.
  DType grad_wire = DType::float32;
};

/// A problem, its layout on the mesh, and choices that the library otherwise makes.
///
///     AttentionOptions options{{.shape = shape, .dtype = DType::bfloat16},
///                              {.layout = LayoutKind::zigzag},
///                              {.schedule = "ring"}};
struct AttentionOptions : AttentionProblem, ring::LayoutOptions, ring::Choice {
  /// The parts of the mask that apply if there is a bias; of later masks too (set_mask()).
  BiasPolicy bias_policy = BiasPolicy::combine;
  /// Makes the bias of all calls, once, in the constructor of Attention. It is used only if there
  /// is neither a bias nor a mask: dense mask, blocks, segments or lengths. Causal and window do
  /// not count as a mask here; `bias_policy` says whether they apply beside the bias. Calls must
  /// not pass another bias.
  std::optional<InitBias> init_bias = {};
  /// Decides what Choice leaves open. Without `tuning.cache`, the cache in memory is the context's.
  ring::TuningOptions tuning = {};
  /// How plans are made; Choice overrides its members. ring::PlanOptions::for_place() if absent.
  std::optional<ring::PlanOptions> plan = {};
  /// The model for predictions: see ring::read_cost_model(). Null: an assumed one.
  std::shared_ptr<const ring::CostModel> cost_model = {};
  /// Records all calls; must outlive Attention. Either all ranks have one, or none has. It serves
  /// the program's --trace; its header is not installed.
  Tracer* tracer = nullptr;
  BackwardChoice backward = {};
};

/// The local shards of one call, contiguous [b,t,n,d], where the context computes.
///
/// Finite numbers give finite results if q·k, the logits and the sums of |v| over the keys that a
/// row sees are at most 10³⁸ in magnitude, as kernels add in float32 and divide last. On GPUs,
/// logits of the half types must be at most 10⁶. See docs/semantics.md §1.
struct AttentionTensors {
  const void* query = nullptr;  ///< query_shape()
  const void* key = nullptr;    ///< key_shape()
  const void* value = nullptr;  ///< value_shape()
  void* output = nullptr;       ///< output_shape()
  float* lse = nullptr;         ///< [b,n,t]; may be null; must be null for an unnormalised output
  /// The rank's rows of the bias, for all keys: bias_shape(). An entry of −∞ hides its pair.
  const float* bias = nullptr;
  /// The rank's rows of the dense mask, for all keys: mask_shape(). One byte per entry, 0 where a
  /// pair is hidden. Not read if the bias policy is bias_wins and there is a bias.
  const void* mask = nullptr;
  void* weights = nullptr;  ///< weights_shape(), of weights_dtype(); if the options ask for them
  /// Maximum and sum, [b,n,t], lse_shape(), if the options ask for an unnormalised output.
  float* maximum = nullptr;
  float* sum = nullptr;
  /// This call's own values of what AttentionOptions::call_arguments names. They are checked like
  /// the tensors.
  ring::CallValues call_values = {};
};

/// The results of one call, in newly allocated memory of the context's device.
struct AttentionOutput {
  Tensor outputs;                      ///< output_shape()
  std::optional<Tensor> lse = {};      ///< [b,n,t], float32
  std::optional<Tensor> weights = {};  ///< weights_shape()
  std::optional<Tensor> maximum = {};  ///< [b,n,t], float32, with an unnormalised output
  std::optional<Tensor> sum = {};      ///< likewise
};

/// The local shards of one call of the backward pass, contiguous [b,t,n,d], where the context
/// computes. The problem's dtype, unless said otherwise.
struct BackwardTensors {
  const void* query = nullptr;        ///< query_shape(); as in the forward pass
  const void* key = nullptr;          ///< key_shape()
  const void* value = nullptr;        ///< value_shape()
  const void* output = nullptr;       ///< output_shape(): the forward pass's result …
  const float* lse = nullptr;         ///< … and its LSE, lse_shape()
  const void* grad_output = nullptr;  ///< output_shape(): gradient with respect to the output
  void* grad_query = nullptr;         ///< query_shape()
  void* grad_key = nullptr;           ///< key_shape()
  void* grad_value = nullptr;         ///< value_shape()
  /// lse_shape(): the gradient of the loss with respect to the LSE; null if the loss does not
  /// depend on it. All ranks pass one, or none does.
  const float* grad_lse = nullptr;
  const float* bias = nullptr;  ///< as in the forward pass
  const void* mask = nullptr;   ///< likewise
  /// Adds to the gradients that are there, instead of overwriting them. The same on all ranks.
  bool accumulate = false;
  ring::CallValues call_values = {};  ///< as in the forward pass
  /// sinks_shape(): the gradient of the sinks; null: not wanted. All ranks want it, or none does.
  float* grad_sinks = nullptr;
  /// bias_shape(): the gradient of the bias, of init_bias too; null: not wanted. All ranks want it,
  /// or none does.
  float* grad_bias = nullptr;
};

/// Attention over shards of tensors, planned once and run as often as wanted. Any thread may call,
/// one at a time, whatever CUDA device is current.
class Attention {
 public:
  /// Collective over the context: either all ranks get the object, or all throw the same error. If
  /// a kernel refuses a block when it is prepared, all ranks replan the block for another kernel.
  /// If a choice of the tuning chain fails, the next link decides; an error then says what was
  /// tried.
  Attention(Context& context, const AttentionOptions& options);
  /// The library chooses the layout and everything else.
  Attention(Context& context, const AttentionProblem& problem);
  /// Waits for calls under way. Graphs of the caller may live on: see run().
  ~Attention();
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  /// Shapes of this rank's shards.
  [[nodiscard]] Extents query_shape() const;   ///< [b,t,n,D]
  [[nodiscard]] Extents key_shape() const;     ///< [b,s,k,D]
  [[nodiscard]] Extents value_shape() const;   ///< [b,s,k,Dv]
  [[nodiscard]] Extents output_shape() const;  ///< [b,t,n,Dv]
  [[nodiscard]] Extents lse_shape() const;     ///< [b,n,t]; of maximum and sum too
  /// [b,n,t,S], 1 where it is broadcast: the rows at query_positions(), and all keys in global
  /// order. Without dimensions if there is none.
  [[nodiscard]] Extents bias_shape() const;
  [[nodiscard]] Extents mask_shape() const;
  /// [n,M], the sinks of the rank's heads, or [M] where all heads share them; without dimensions if
  /// there are none.
  [[nodiscard]] Extents sinks_shape() const;
  /// [b,n,t,S], for all keys; see annulus::attention_weights().
  [[nodiscard]] Extents weights_shape() const;
  /// float64 if the tensors or the softmax are float64, else float32.
  [[nodiscard]] DType weights_dtype() const;
  /// Global positions of the rank's query and key tokens, in local order.
  [[nodiscard]] PositionRanges query_positions() const;
  [[nodiscard]] PositionRanges key_positions() const;

  /// Collective over the context. On a GPU the call is enqueued on `stream`, a cudaStream_t, null
  /// for CUDA's default stream: it starts after earlier work on that stream, later work there sees
  /// its results, and the host does not wait. On the CPU the work is done when the function
  /// returns. Tensors of the first call are checked on all ranks before anything is sent (UserError
  /// on all of them). A later failure is thrown by the next call or by wait(), as LibraryError; the
  /// job can then only be aborted. Calls of a context run one after the other, on any streams. What
  /// a call writes must not overlap its other tensors; this is not checked.
  ///
  /// The first call cannot be captured into a CUDA graph, nor can the first call after set_mask()
  /// has planned again. Later calls can, under schedules other than allgather. A graph computes
  /// what was captured, whatever prepare() and set_mask() do later, even after this object has
  /// ended: its resources are kept until the graph is destroyed or the context ends. Graphs and
  /// calls of a context run in the order in which they are launched, which must be the same on all
  /// ranks. The calls inside a graph run in the order of capture, on any streams. wait() and the
  /// destructor also wait for launched graphs. While calls of the object are being captured,
  /// wait(), prepare() and set_mask() throw UnsupportedError. A call that cannot be captured leaves
  /// the object usable as before.
  void run(const AttentionTensors& tensors, void* stream = nullptr);
  /// Like run(), but returns new tensors: weights if the options ask for them, and the LSE if
  /// `with_lse`, or maximum and sum if the options ask for an unnormalised output. The result
  /// pointers in `inputs` are ignored. On a GPU the tensors belong to `stream`, which must outlive
  /// them. Drop them as soon as the work that reads them has been enqueued on `stream`: only
  /// results of later calls on the same stream use their memory again. If work on other streams
  /// reads them, it must first end, or be ordered before later work of `stream`. Results of a
  /// captured call must live as long as its graph.
  [[nodiscard]] AttentionOutput compute(const AttentionTensors& inputs, bool with_lse = true,
                                        void* stream = nullptr);
  /// Like run() above, for tensors with any strides. An LSE or weights without memory are not
  /// returned.
  void run(const ring::LocalTensors& tensors, void* stream = nullptr);
  /// A call that is done when it returns. It is ordered with no stream, so the tensors must be
  /// complete.
  void run_and_wait(const ring::LocalTensors& tensors);
  /// Prepares for tensors of these strides, with a new plan if kernels refuse them. Collective over
  /// the context. All ranks throw the same error if the tensors of one do not fit (UserError) or
  /// one lacks memory (AgreedFailure); the object then stays usable as before. Without prepare(),
  /// calls with other strides work too, but each rank prepares by itself, and tensors that do not
  /// fit make that rank alone fail.
  void prepare(const ring::LocalTensors& tensors);
  /// Computes the gradients of query, key and value, and of the sinks and the bias on request, from
  /// the output, its LSE and their gradients (docs/semantics.md §1, "Gradients"). Collective over
  /// the context, ordered by the stream, and checked in the first call like run(). Gradients of an
  /// operand that several ranks hold are the same on all of them.
  ///
  /// The first call of a kind plans the pass unless prepare_backward() has. The kind is: with or
  /// without gradients of the LSE, the sinks and the bias, and with or without accumulation.
  /// Schedule and implementations are chosen independently of the forward pass. All ranks throw the
  /// same UserError if they ask for different gradients in first calls, for an unnormalised output
  /// or attention weights, for a named schedule that has no backward pass, and if no implementation
  /// computes the gradients.
  void backward(const BackwardTensors& tensors, void* stream = nullptr);
  /// The same for tensors with any strides.
  void backward(const ring::BackwardLocalTensors& tensors, bool accumulate = false,
                void* stream = nullptr);
  /// A call that is done when it returns. It is ordered with no stream, so the tensors must be
  /// complete.
  void backward_and_wait(const ring::BackwardLocalTensors& tensors, bool accumulate = false);
  /// Plans the backward pass for later calls of this kind; does nothing if it is planned already.
  /// Collective over the context, with the errors of backward().
  void prepare_backward(const ring::BackwardRequest& request = {});
  /// Views of contiguous shards.
  [[nodiscard]] ring::BackwardLocalTensors backward_views(const BackwardTensors& tensors) const;
  /// Replaces the mask for later calls, such as the lengths or documents of another batch. Shards
  /// stay where they are: a balanced layout stays as it was for the first mask. Collective over the
  /// context. Waits for earlier calls and replans, but compiles nothing again; the backward pass is
  /// replanned at its next use. If the mask differs only in lengths and offsets that are call
  /// arguments, and the lengths do not exceed the planned ones, nothing is planned and no rank
  /// communicates. All ranks throw the same error for a mask that does not fit or that no
  /// implementation accepts (UserError); the object then stays usable as before.
  ///
  /// Rank 0 chooses the schedule for the new mask, which takes seconds on a thousand ranks, unless
  /// `next` keeps the schedule of each pass. Ranks must agree on `next`.
  void set_mask(const Mask& mask, ring::NextSchedule next = ring::NextSchedule::chosen);
  /// Returns when all calls are done. Throws UserError, on this rank alone, if a call read a length
  /// from device memory that was out of bounds; the object stays usable.
  void wait();

  /// Views of contiguous shards.
  [[nodiscard]] ring::LocalTensors views(const AttentionTensors& tensors) const;
  /// How the tensors of the whole problem are sharded.
  [[nodiscard]] const ring::ShardedOperands& operands() const noexcept;

  /// The tasks of this rank in a call.
  [[nodiscard]] const ring::RankPlan& rank_plan() const noexcept;
  /// Only rank 0 knows why other schedules were passed over.
  [[nodiscard]] const ring::ScheduleChoice& schedule() const noexcept;
  /// The link of the tuning chain that decided, its choice, and why.
  [[nodiscard]] const ring::Decision& decision() const noexcept;
  /// The implementations that cannot compute the problem, or some of this rank's blocks, and why.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> passed_over() const;
  /// Names of the implementations that compute blocks on any rank, joined by "+"; "none" without
  /// blocks. Collective over the context.
  [[nodiscard]] std::string implementations_of_ranks() const;
  /// "mpi", "nccl", "peer", "composite" or "self".
  [[nodiscard]] const std::string& transport() const noexcept;
  /// Bytes of memory besides the caller's tensors, without the workspace of kernels. Objects of a
  /// context share memory where they need nearly as much, so together they take less than the sum.
  [[nodiscard]] std::size_t extra_bytes() const;
  /// The number of calls that the device has replayed from a recording.
  [[nodiscard]] std::size_t replays() const;
  /// True if this rank merges partial results that kernels have rounded to the problem's dtype.
  [[nodiscard]] bool reduces_rounded() const;

  // For the library and its program: headers of these classes are not installed.

  /// The input of the planner, prices included.
  [[nodiscard]] const ring::PlanInput& plan_input() const noexcept;
  /// The implementations that can compute the problem, and the ones that passed_over() names.
  [[nodiscard]] Selection selection() const;
  /// Plan, schedule and implementations of the forward pass …
  [[nodiscard]] ring::ShardedAttention& forward_pass() const noexcept;
  /// … and of the backward pass; null before it is planned.
  [[nodiscard]] ring::ShardedAttention* backward_pass(
      const ring::BackwardRequest& request = {}) const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

namespace ring {
/// Reads what `annulus bench --calibrate` writes. Throws FileError, naming `path` and the key that
/// is wrong.
[[nodiscard]] std::shared_ptr<const CostModel> read_cost_model(std::string_view text,
                                                               const std::string& path);
}  // namespace ring

/// The plan options of a place, with the parameters that `choice` names.
[[nodiscard]] ring::PlanOptions plan_options(const ring::Choice& choice, Place place);

}  // namespace annulus
