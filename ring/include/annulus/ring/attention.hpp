#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <annulus/attention/bias_policy.hpp>
#include <annulus/attention/problem.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/partition/attention_mode.hpp>
#include <annulus/partition/partition_spec.hpp>
#include <annulus/partition/position.hpp>
#include <annulus/partition/sequence_layout.hpp>
#include <annulus/partition/sharding_rules.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/sharded_attention.hpp>

namespace annulus {

/// Makes the bias where neither a mask nor a bias is given.
struct InitBias {
  Extents shape;  ///< of the whole bias: each dimension is 1 or that of [B,N,T,S]
  /// Fills a rank's part, a contiguous float32 host tensor. `index` gives the global positions that
  /// the part holds along each dimension. It must not call MPI.
  std::function<void(const TensorView& part, std::span<const PositionRanges> index)> fill;
};

/// What to compute, and choices that the library otherwise makes.
struct AttentionOptions {
  AttentionShape shape;                 ///< of the whole, unsharded problem
  DType dtype = DType::bfloat16;        ///< of query, key, value and output
  Mask mask = {};                       ///< nothing is hidden if not given
  std::optional<double> scale = {};     ///< 1/√D if absent
  std::optional<double> soft_cap = {};  ///< none if absent
  std::optional<Sinks> sinks = {};      ///< likewise
  std::optional<Dropout> dropout = {};  ///< likewise
  /// The dtype of the softmax's weights and sums. Only vanilla computes in float64.
  DType softmax_dtype = DType::float32;
  /// Shapes of a bias on the logits, float32, and of a dense mask, bool: each dimension is 1 or
  /// that of [B,N,T,S]. Every call passes their entries (AttentionTensors).
  std::optional<Extents> bias = {};
  std::optional<Extents> dense_mask = {};
  /// Which parts of the mask apply if there is a bias; also for later masks (set_mask()).
  BiasPolicy bias_policy = BiasPolicy::combine;
  /// Makes the bias of all calls, once, in the constructor of Attention; only if there is neither a
  /// bias nor a mask: dense mask, blocks, segments or lengths. Causal and window do not count; they
  /// apply beside the bias as `bias_policy` says. Calls then must not pass a bias.
  std::optional<InitBias> init_bias = {};
  /// Every call also returns the attention weights. Only vanilla computes them, on the CPU.
  bool weights = false;
  /// If false, every call gives the output before its division by the softmax's denominator, with
  /// the maximum of the logits and that denominator in place of an LSE: see AttentionProblem. Only
  /// the implementations native and vanilla do.
  bool normalize_output = true;

  /// Specs of query and output [B,T,N,D], and of key and value [B,S,K,D]. Without them, `rules`
  /// decide, for `mode`.
  std::optional<PartitionSpec> query_spec = {};
  std::optional<PartitionSpec> kv_spec = {};
  /// Of bias and dense mask [B,N,T,S]. They follow from the query's spec (ring::scores_spec()); one
  /// that is given must say the same.
  std::optional<PartitionSpec> bias_spec = {};
  std::optional<PartitionSpec> mask_spec = {};
  /// The default rules shard the batch along fsdp and dp, the sequence along sp and heads along tp,
  /// as far as the mesh has these axes.
  ShardingRules rules = {};
  std::optional<AttentionMode> mode = {};  ///< without it: see infer_attention_mode()
  /// How a sharded sequence is dealt out. Without it: zigzag under a causal mask, which gives all
  /// ranks the same work if nothing else is masked; contiguous otherwise; balanced where documents,
  /// blocks or lengths of `mask` make these uneven (see ring::usual_layout()). query_positions()
  /// and key_positions() return what a rank holds under any layout.
  std::optional<LayoutKind> layout = {};
  /// The layout of key and value; the same as `layout` if absent.
  std::optional<LayoutKind> kv_layout = {};
  /// Chunks of a sequence are multiples of this many positions; see SequenceLayout.
  std::optional<std::int64_t> granule = {};
  std::string schedule = "auto";
  int ulysses_degree = 0;               ///< of the schedule hybrid; see ring::PlanOptions
  int inner_size = 0;                   ///< of the schedule double_ring; likewise
  std::string implementation = "auto";  ///< a name of the registry
  /// Who decides what is left open of these, and the transport. Its cache in memory is the
  /// context's unless it names another.
  ring::TuningOptions tuning = {};
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
  float* lse = nullptr;         ///< [b,n,t]; may be null, and is if the output is unnormalised
  /// The rank's rows of the bias, for all keys: bias_shape(). An entry of −∞ hides its pair.
  const float* bias = nullptr;
  /// The rank's rows of the dense mask, for all keys: mask_shape(). One byte per entry, 0 where a
  /// pair is hidden. Not read if the bias policy is bias_wins and there is a bias.
  const void* mask = nullptr;
  void* weights = nullptr;  ///< weights_shape(), of weights_dtype(); if the options want them
  /// Both [b,n,t], lse_shape(), if the options want an unnormalised output.
  float* maximum = nullptr;
  float* sum = nullptr;
};

/// The results of one call, in newly allocated memory of the context's device.
struct AttentionOutput {
  Tensor outputs;                      ///< output_shape()
  std::optional<Tensor> lse = {};      ///< [b,n,t], float32
  std::optional<Tensor> weights = {};  ///< weights_shape()
  std::optional<Tensor> maximum = {};  ///< [b,n,t], float32: of an unnormalised output
  std::optional<Tensor> sum = {};      ///< likewise
};

/// Attention over shards of tensors, planned once and run as often as wanted. Any thread may call,
/// one at a time, whatever CUDA device is current.
class Attention {
 public:
  /// Collective over the context: either all ranks get the object, or all throw the same error.
  Attention(Context& context, const AttentionOptions& options);
  /// Waits for calls under way.
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
  /// [b,n,t,S], for all keys; see annulus::attention_weights().
  [[nodiscard]] Extents weights_shape() const;
  /// float64 if the tensors or the softmax are float64, else float32.
  [[nodiscard]] DType weights_dtype() const;
  /// Global positions of the rank's query and key tokens, in local order.
  [[nodiscard]] PositionRanges query_positions() const;
  [[nodiscard]] PositionRanges key_positions() const;

  /// Collective over the context. On a GPU the call is enqueued on `stream`, a cudaStream_t, null
  /// for CUDA's default stream: it starts after what was enqueued there before, what is enqueued
  /// there afterwards sees its results, and the host waits for nothing. On the CPU it is done when
  /// it returns. Tensors of the first call are checked on all ranks before anything travels
  /// (UserError on all of them). A later failure is thrown by the next call or by wait(), as
  /// LibraryError; the job can then only be aborted. Under NCCL, objects that share one context but
  /// whose sequences are sharded along different axes must be called on one stream: exchanges of
  /// two communicators must not wait for each other in different orders. A first call cannot be
  /// captured into a CUDA graph; later ones can, under schedules other than allgather.
  void run(const AttentionTensors& tensors, void* stream = nullptr);
  /// Like run(), but returns new tensors: weights if the options ask for them, and the LSE if
  /// `with_lse`, or maximum and sum if the options ask for an unnormalised output. The result
  /// pointers in `inputs` are ignored.
  [[nodiscard]] AttentionOutput compute(const AttentionTensors& inputs, bool with_lse = true,
                                        void* stream = nullptr);
  /// Like run() above, for tensors with any strides and without weights; see ring::LocalTensors. An
  /// LSE without memory is not returned.
  void run(const ring::LocalTensors& tensors, void* stream = nullptr);
  /// Makes ready for tensors of other strides, collectively. See ring::ShardedAttention::prepare.
  void prepare(const ring::LocalTensors& tensors);
  /// Replaces the mask for later calls, such as the lengths or documents of another batch. Shards
  /// stay where they are. Balanced ones keep the layout for the mask that the object was made with.
  /// Collective over the context. Waits for earlier calls and replans, but compiles nothing again.
  /// See ring::ShardedAttention::set_mask.
  void set_mask(const Mask& mask);
  /// Returns when all calls are done.
  void wait();

  /// Views of contiguous shards.
  [[nodiscard]] ring::LocalTensors views(const AttentionTensors& tensors) const;
  /// Plan, schedule, implementations, memory.
  [[nodiscard]] const ring::ShardedAttention& sharded() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace annulus
