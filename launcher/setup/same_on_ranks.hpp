#pragma once

#include <string>
#include <string_view>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/control.hpp>

namespace annulus::launcher {

/// Collective. Throws a UserError on every rank, naming the first rank whose `text` differs from
/// rank 0's.
inline void require_same(Control& ranks, std::string_view what, const std::string& text) {
  const auto other = ranks.first_difference(text, what);
  if (!other) return;
  throw UserError(fmt::format("rank {}: {}: '{}', expected '{}' as on rank 0", other->rank, what,
                              other->text, other->expected));
}

}  // namespace annulus::launcher
