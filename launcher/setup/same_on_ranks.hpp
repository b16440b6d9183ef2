#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/control.hpp>

namespace annulus::launcher {

/// Collective. Throws a UserError on every rank, naming the first rank whose `text` is not rank
/// 0's.
inline void require_same(Control& ranks, std::string_view what, const std::string& text) {
  const std::vector<std::string> texts = ranks.gather_text(text, what);
  const auto other = std::find_if(texts.begin(), texts.end(),
                                  [&](const std::string& t) { return t != texts.front(); });
  if (other == texts.end()) return;
  throw UserError(fmt::format("rank {}: {}: '{}', expected '{}' as on rank 0",
                              other - texts.begin(), what, *other, texts.front()));
}

}  // namespace annulus::launcher
