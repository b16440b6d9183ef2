#include "launcher/options/nearest.hpp"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <numeric>
#include <utility>

#include <fmt/format.h>

namespace annulus::launcher {
namespace {

bool same_letter(char a, char b) {
  return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
}

// The number of edits (insert, delete, replace a character) between two words; capital letters
// count as small ones.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (same_letter(a[i - 1], b[j - 1]) ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_hint(std::string_view word, std::string_view prefix,
                         const std::vector<std::string>& candidates) {
  const auto nearest = std::min_element(candidates.begin(), candidates.end(),
                                        [&](const std::string& a, const std::string& b) {
                                          return edit_distance(word, a) < edit_distance(word, b);
                                        });
  if (nearest == candidates.end()) return {};
  // A short word with every letter replaced is not a typing error.
  const std::size_t most = std::min(std::max<std::size_t>(2, word.size() / 3),
                                    nearest->size() - std::min<std::size_t>(1, nearest->size()));
  if (edit_distance(word, *nearest) > most) return {};
  return fmt::format("; the nearest is {}{}", prefix, *nearest);
}

}  // namespace annulus::launcher
