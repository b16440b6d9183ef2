#pragma once

#include <string_view>

namespace annulus {

/// The deepest nesting of brackets in our JSON files; the files that we write nest four deep.
inline constexpr int kMaximumJsonNesting = 64;

/// True if the brackets of a JSON text nest deeper than that. Check before parsing: the parser
/// takes any depth, but copying and printing a value recurse, and could exhaust the stack.
[[nodiscard]] bool nests_too_deep(std::string_view json) noexcept;

}  // namespace annulus
