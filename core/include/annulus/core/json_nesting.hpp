#pragma once

#include <string_view>

namespace annulus {

/// The deepest brackets that our JSON files may have; those that we write are four deep.
inline constexpr int kMaximumJsonNesting = 64;

/// True if the brackets of a JSON text nest deeper than that. To be asked before parsing: the
/// parser takes any depth, but copying and printing a value recurse, and a deep one exhausts the
/// stack.
[[nodiscard]] bool nests_too_deep(std::string_view json) noexcept;

}  // namespace annulus
