#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

#include <annulus/attention/problem.hpp>

namespace annulus {

/// The costliest part that hides pairs or changes their logits, in order of the work per pair.
enum class MaskKind : std::uint8_t {
  none,
  band,      ///< causal or a window
  segments,  ///< segment ids, packed documents or lengths
  blocks,    ///< a block mask
  general    ///< a bias, a dense mask or dropout
};

[[nodiscard]] std::string_view name_of(MaskKind kind) noexcept;
/// Throws ArgumentError("mask", …), listing the names, for any other text.
[[nodiscard]] MaskKind parse_mask_kind(std::string_view name);

/// A pass of a problem.
enum class Pass : std::uint8_t { forward, backward };

/// "forward", "backward".
[[nodiscard]] std::string_view name_of(Pass pass) noexcept;
/// Throws ArgumentError("pass", …) for any other text.
[[nodiscard]] Pass parse_pass(std::string_view name);

/// Properties that strongly affect the rate of a kernel. Rates are measured and assumed per class.
struct ProblemClass {
  DType dtype = DType::float32;
  std::int64_t head_dim = 1;   ///< D
  std::int64_t value_dim = 1;  ///< Dv
  MaskKind mask = MaskKind::none;
  bool soft_cap = false;
  Pass pass = Pass::forward;
  auto operator<=>(const ProblemClass&) const = default;
};

[[nodiscard]] ProblemClass class_of(const AttentionProblem& problem, Pass pass = Pass::forward);

/// "bfloat16 D=128 Dv=128, mask band, soft cap, backward".
[[nodiscard]] std::string to_string(const ProblemClass& problem);

}  // namespace annulus
