#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <annulus/attention/dropout.hpp>
#include <annulus/attention/mask.hpp>
#include <annulus/attention/sinks.hpp>
#include <annulus/core/dtype.hpp>
#include <annulus/core/place.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus {

/// Sizes of an attention problem: query [B,T,N,D], key [B,S,K,D], value [B,S,K,Dv], output
/// [B,T,N,Dv].
struct AttentionShape {
  std::int64_t batch = 1;         ///< B
  std::int64_t query_length = 0;  ///< T
  std::int64_t kv_length = 0;     ///< S
  std::int64_t heads = 1;         ///< N, query heads: a multiple of K
  std::int64_t kv_heads = 1;      ///< K; query head n reads key/value head n / (N/K)
  std::int64_t head_dim = 1;      ///< D
  std::int64_t value_dim = 1;     ///< Dv

  [[nodiscard]] std::int64_t heads_per_kv_head() const { return heads / kv_heads; }
  bool operator==(const AttentionShape&) const = default;
  /// Throws ArgumentError, naming the field, for sizes below 0 (heads and dims: below 1) and if N
  /// is not a multiple of K; naming the shape, for a tensor of 2^60 elements or more and for 2^62
  /// (query, key) pairs or more. Elements, bytes and pairs of a valid shape can be counted in 64
  /// bits.
  void validate() const;
};

/// "B=1 T=1024 S=1024 N=8 K=2 D=64 Dv=64".
[[nodiscard]] std::string to_string(const AttentionShape& shape);

/// The values that change from call to call. Calls pass them, and one plan serves all calls.
struct CallArguments {
  /// Lengths of queries and keys, at most the mask's, or T and S.
  bool lengths = false;
  bool offsets = false;  ///< any offsets, so plans skip nothing that causal, window or chunk hide
  bool dropout_seed = false;

  /// True if the visible pairs differ between calls.
  [[nodiscard]] bool change_visibility() const { return lengths || offsets; }
  [[nodiscard]] bool any() const { return change_visibility() || dropout_seed; }
  bool operator==(const CallArguments&) const = default;
};

/// "lengths, offsets, dropout seed"; "none".
[[nodiscard]] std::string to_string(const CallArguments& arguments);

/// The calls that must give the same bits, of results and of gradients.
enum class Reproducible : std::uint8_t {
  /// None: gradients may be added in a varying order. The forward pass still repeats its bits,
  /// unless a kernel that does not is named.
  no,
  run,  ///< repeated calls
  /// Calls on any number of ranks, too. A row's result then depends only on its keys, summed in
  /// global order, and the gradients of a key only on its rows. A problem that no implementation
  /// and no schedule computes like this is refused.
  world
};

[[nodiscard]] std::string_view name_of(Reproducible reproducible) noexcept;

/// The whole, unsharded problem, without its tensors.
///
/// A logit is s = scale · q·k, then soft_cap · tanh(s / soft_cap) if capped, plus the bias; masked
/// entries become −∞ before the softmax. Sinks enter its denominator, and dropout acts on its
/// probabilities. A row that sees no key gives output 0 and LSE −∞, or the LSE of its sinks
/// (docs/semantics.md §1).
struct AttentionProblem {
  AttentionShape shape;
  DType dtype = DType::float32;         ///< of query, key, value and output
  std::optional<double> scale = {};     ///< 1/√D if absent
  std::optional<double> soft_cap = {};  ///< none if absent
  Mask mask = {};                       ///< nothing is hidden if not given
  std::optional<Sinks> sinks = {};      ///< none if absent
  std::optional<Dropout> dropout = {};  ///< likewise
  /// The dtype of weights and sums. Tensors in float64 always use float64.
  DType softmax_dtype = DType::float32;
  /// Shapes of a bias, added after the soft cap, and of a dense mask; none if absent. Each
  /// dimension is 1 or that of [B,N,T,S]. Each call passes their entries (see ScoreTensors).
  std::optional<Extents> bias = {};
  std::optional<Extents> dense_mask = {};
  bool weights = false;  ///< return attention weights: see attention_weights.hpp
  /// If false, a row's results are its largest logit m, Σ exp(s − m) and, as the output, Σ exp(s −
  /// m) · v; (−∞, 0, 0) if it sees no key. Dropout changes only the output. The LSE is m + log Σ
  /// exp(s − m). float16 may overflow in such an output.
  bool normalize_output = true;
  /// Calls that pass none use lengths and offsets of the mask and the seed of the dropout.
  CallArguments call_arguments = {};
  std::optional<Reproducible> reproducible = {};  ///< absent: `run` on CPUs, `no` on GPUs

  [[nodiscard]] bool in_global_order() const { return reproducible == Reproducible::world; }
  [[nodiscard]] bool repeats_bits(Place place) const {
    return reproducible ? *reproducible != Reproducible::no : place.is_host();
  }
  [[nodiscard]] double logit_scale() const;
  /// Throws ArgumentError, naming the field, for what AttentionShape::validate() refuses; a dtype
  /// other than float16, bfloat16, float32 or float64 (softmax: the latter two); a scale that is
  /// not finite in float32; a soft cap that is not a normal positive number in float32; a mask,
  /// sinks or a bias that do not fit the shape; with dropout, a size of 2^32 or more; attention
  /// weights of an unnormalised output; a seed as a call argument without dropout, and offsets with
  /// two packings.
  void validate() const;
};

/// The problem with a mask that shows every pair that any call can show; plans are made for it.
[[nodiscard]] AttentionProblem bound_of(AttentionProblem problem);

/// 2 · N · (D + Dv) operations per visible pair, the usual count: 4 · pairs · N · D if D = Dv.
[[nodiscard]] double forward_flops(const AttentionShape& shape, double visible_pairs);

}  // namespace annulus
