#include <cstddef>

#include <annulus/core/json_nesting.hpp>

namespace annulus {

bool nests_too_deep(std::string_view json) noexcept {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    switch (json[i]) {
      case '"':
        in_string = !in_string;
        break;
      case '\\':
        ++i;  // an escaped quote does not end a string
        break;
      case '[':
      case '{':
        if (!in_string && ++depth > kMaximumJsonNesting) return true;
        break;
      case ']':
      case '}':
        if (!in_string) --depth;
        break;
      default:
        break;
    }
  }
  return false;
}

}  // namespace annulus
