#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/attention/mask.hpp>
#include <annulus/core/dtype.hpp>
#include <annulus/core/place.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus {

/// The log of the sum of the exponentials; −∞ if there are no logits, or all are −∞.
[[nodiscard]] double log_sum_exp(std::span<const float> logits);

/// Extra logits of each query head that enter the softmax's denominator once, without a value
/// (docs/semantics.md §1). They are neither scaled nor capped, and no mask hides them: they count
/// even in a row that sees no key.
///
/// For each row they are a softmax state with output 0 and LSE lse(). Merging it once with the
/// state over the keys gives the result, for any blocks, hops and ranks. Copies share the logits.
class Sinks {
 public:
  /// [N,M] row-major, or [M] for all heads alike. Throws ArgumentError("sinks", …) for another
  /// rank, for sizes below 1 and for logits that are NaN or +∞; −∞ has no weight.
  Sinks(const Extents& shape, std::vector<float> logits);
  /// Draws logits uniformly from [−2, 2). A seed gives the same values on every machine.
  static Sinks random(std::int64_t heads, std::int64_t per_head, std::uint64_t seed);

  /// [N,M] or [M].
  [[nodiscard]] const Extents& shape() const noexcept { return data_->shape; }
  [[nodiscard]] std::int64_t per_head() const { return shape()[shape().rank() - 1]; }
  /// The sinks of a query head, given by its global index.
  [[nodiscard]] std::span<const float> of_head(std::int64_t head) const;
  /// The log of the sum of the exponentials of a head's sinks.
  [[nodiscard]] double lse(std::int64_t head) const { return log_sum_exp(of_head(head)); }
  /// A 64-bit hash.
  [[nodiscard]] std::uint64_t digest() const noexcept { return data_->digest; }
  bool operator==(const Sinks& other) const;

  /// Throws ArgumentError("sinks", …) unless they suit this number of heads.
  void validate(std::int64_t heads) const;

 private:
  struct Data {
    Extents shape;
    std::vector<float> logits;
    std::uint64_t digest = 0;
  };
  std::shared_ptr<const Data> data_;
};

/// "sinks [8, 2]".
[[nodiscard]] std::string to_string(const Sinks& sinks);

/// Dropout of attention probabilities (docs/semantics.md §1). The seed and an entry's global batch,
/// query head, query position and key position alone decide whether it drops. So the same entries
/// drop under every sharding, schedule, kernel and block size.
///
/// One call of Philox 4x32-10 decides eight keys, with sixteen bits each. The eight are chosen so
/// that a thread of a tensor-core tile uses all the bits of a call: key j has half j mod 2 of word
/// (j mod 32) / 8 of counter 4 (j / 32) + (j mod 8) / 2. An entry drops if its bits are below
/// threshold().
class Dropout {
 public:
  /// The probability is rounded to a multiple of 2⁻¹⁶ above 0 and below 1; 0 stays 0. Throws
  /// ArgumentError("dropout", …) unless it is at least 0 and below 1.
  Dropout(double probability, std::uint64_t seed);

  [[nodiscard]] double probability() const { return threshold_ / 65536.0; }
  [[nodiscard]] std::uint64_t seed() const noexcept { return seed_; }
  [[nodiscard]] std::uint32_t threshold() const noexcept { return threshold_; }
  /// The factor of the probabilities that are kept.
  [[nodiscard]] double keep_scale() const { return 1 / (1 - probability()); }
  bool operator==(const Dropout&) const = default;

  /// True if an entry drops. All indices are global.
  [[nodiscard]] bool drops(std::int64_t batch, std::int64_t head, GlobalPosition row,
                           GlobalPosition column) const;

  /// The third and fourth words of a counter. The first depends on the key position; the second is
  /// the query position.
  static constexpr std::uint32_t third_word(std::int64_t head) {
    return static_cast<std::uint32_t>(head);
  }
  static constexpr std::uint32_t fourth_word(std::int64_t batch) {
    return static_cast<std::uint32_t>(batch) + kDropoutStream;
  }
  /// Sequence lengths, heads and batches must be below this, so that no two entries share bits.
  static constexpr std::int64_t kMaximumIndices = std::int64_t{1} << 32;

 private:
  static constexpr std::uint32_t kDropoutStream = 0x64726f70;  // no other use of a seed has it
  std::uint32_t threshold_;
  std::uint64_t seed_;
};

/// "dropout 0.1, seed 5".
[[nodiscard]] std::string to_string(const Dropout& dropout);

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
  /// Throws ArgumentError. It names the field for sizes below 0 (heads and dims: below 1) and if N
  /// is not a multiple of K. It names the shape for a tensor of 2^60 elements or more and for 2^62
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
  /// No calls: gradients may be added in a varying order. The forward pass still repeats its bits,
  /// unless the caller names a kernel that does not.
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
  Mask mask = {};                       ///< hides nothing by default
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

/// The parts of a mask that apply if there is a bias (docs/semantics.md §1).
enum class BiasPolicy : std::uint8_t {
  combine,              ///< all: mask and bias both apply
  bias_wins,            ///< none: the whole mask is ignored
  bias_disables_causal  ///< all but the causal part
};

[[nodiscard]] std::string_view name_of(BiasPolicy policy) noexcept;
/// Throws ArgumentError("bias policy", …) for an unknown name.
[[nodiscard]] BiasPolicy parse_bias_policy(std::string_view name);

/// The part of the mask that applies if there is a bias.
[[nodiscard]] Mask mask_beside_bias(BiasPolicy policy, const Mask& mask);
/// The problem with the policy applied to its mask and its dense mask; unchanged without a bias.
[[nodiscard]] AttentionProblem under_policy(BiasPolicy policy, AttentionProblem problem);

}  // namespace annulus
