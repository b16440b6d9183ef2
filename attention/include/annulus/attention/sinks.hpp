#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

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
  /// Drawn uniformly from [−2, 2). A seed gives the same values on every machine.
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

}  // namespace annulus
