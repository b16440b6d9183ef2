#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus::launcher {

/// "; the nearest is --window" for `word` "windw", `prefix` "--" and a candidate "window"; "" if no
/// candidate is close enough for a typing error.
[[nodiscard]] std::string nearest_hint(std::string_view word, std::string_view prefix,
                                       const std::vector<std::string>& candidates);

}  // namespace annulus::launcher
