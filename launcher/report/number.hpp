#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace annulus::launcher {

/// The number that the whole text spells, if it does and the type holds it.
template <class Number>
[[nodiscard]] std::optional<Number> number_of(std::string_view text) {
  Number number{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end) return std::nullopt;
  return number;
}

}  // namespace annulus::launcher
