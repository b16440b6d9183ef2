#include "launcher/report/tally.hpp"

#include <algorithm>
#include <set>
#include <string_view>

#include <fmt/format.h>

namespace annulus::launcher {
namespace {

using Kind = verification::Failure::Kind;

std::string_view text_of(Kind kind) {
  switch (kind) {
    case Kind::bound:
      return "above a bound";
    case Kind::ratio:
      return "too far above the unsharded error";
    case Kind::repetition:
      return "with different bits in a repeated run";
    case Kind::reproduction:
      return "with other bits than the unsharded run";
  }
  return {};
}

}  // namespace

void Tally::add(const verification::Verification& found) {
  ++problems_;
  const bool rounded_gradients = found.gradients && found.gradients->reduces_rounded;
  reduces_rounded_ += found.reduces_rounded || rounded_gradients ? 1 : 0;
  std::set<Kind> kinds;
  for (const verification::Failure& failure : found.failures()) kinds.insert(failure.kind);
  for (const Kind kind : kinds) ++failures_[kind];
  if (!kinds.empty()) ++failed_;
  if (!kinds.contains(Kind::bound) && !kinds.contains(Kind::ratio)) ++within_bounds_;
  if (const auto ratio = found.ratio(); ratio && !(worst_ratio_ && *ratio <= *worst_ratio_)) {
    worst_ratio_ = ratio;
  }
  row_share_ = std::max(row_share_, found.sharded.row_share);
  lse_share_ = std::max(lse_share_, found.sharded.lse_share);
  ++computed_[found.implementations];
  if (!found.gradients) return;
  const verification::GradientVerification& gradients = *found.gradients;
  if (!gradients.refusal.empty()) {
    ++computed_gradients_["no implementation"];
    return;
  }
  ++computed_gradients_[gradients.implementations];
  adds_rounded_ += gradients.adds_rounded ? 1 : 0;
  gradient_share_ = std::max(gradient_share_.value_or(0), gradients.share());
  if (const auto ratio = gradients.ratio()) {
    gradient_ratio_ = std::max(gradient_ratio_.value_or(0), *ratio);
  }
}

void Tally::add_refused() {
  ++problems_;
  ++failed_;
  ++refused_;
}

std::string Tally::text() const {
  std::string text = fmt::format("{} ({} of {} within bounds", passed() ? "OK" : "FAILED",
                                 within_bounds_, problems_);
  for (const auto& [kind, problems] : failures_) {
    text += fmt::format(", {} {}", problems, text_of(kind));
  }
  if (refused_ > 0) text += fmt::format(", {} not computed", refused_);
  text += fmt::format("; largest share of a row's bound {:.2f}, of its LSE's {:.2f}", row_share_,
                      lse_share_);
  if (gradient_share_) text += fmt::format(", of a gradient's {:.2f}", *gradient_share_);
  if (worst_ratio_)
    text += fmt::format("; largest ratio to the unsharded error {:.2f}", *worst_ratio_);
  if (gradient_ratio_) text += fmt::format(", of gradients {:.2f}", *gradient_ratio_);
  // Rounded results are allowed a larger error; see verify_sharded().
  if (reduces_rounded_ > 0) {
    text += fmt::format("; {} with partial results that a kernel had rounded", reduces_rounded_);
  }
  if (adds_rounded_ > 0) {
    text += fmt::format("; {} with gradients rounded on their way", adds_rounded_);
  }
  if (unordered_ > 0) text += fmt::format("; {} more refused", unordered_);
  return text + ")";
}

}  // namespace annulus::launcher
