#pragma once

#include <cstddef>
#include <cstring>
#include <string>

namespace annulus {

/// Plain values as bytes of texts that processes of one program exchange.
template <class Value>
void append(std::string& text, const Value& value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof(Value));
}

template <class Value>
[[nodiscard]] Value value_at(const std::string& text, std::size_t offset) {
  Value value;
  std::memcpy(&value, text.data() + offset, sizeof(Value));
  return value;
}

}  // namespace annulus
