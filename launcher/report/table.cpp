#include "launcher/report/table.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <string_view>

#include <fmt/format.h>

#include "launcher/options/option_values.hpp"
#include "launcher/report/number.hpp"

namespace annulus::launcher {
namespace {

// A unit is replaced by the next one if a cell reaches `from`.
struct Scale {
  std::string_view unit;
  std::string_view next;
  double divisor;
  double from;
  int digits;
  bool together;  // for all columns of the unit, so that they are comparable
};

constexpr std::array kScales{
    Scale{"µs", "ms", 1e3, 100e3, 3, false}, Scale{"ms", "s", 1e3, 10e3, 3, false},
    Scale{"GFLOP/s", "TFLOP/s", 1e3, 1e3, 2, true}, Scale{"GFLOP", "TFLOP", 1e3, 10e3, 2, false},
    Scale{"MiB", "GiB", 1024, 10 * 1024, 2, false}};

const Scale* scale_of(std::string_view unit) {
  const auto* found = std::find_if(kScales.begin(), kScales.end(), [&](const Scale& scale) {
    if (!unit.starts_with(scale.unit)) return false;
    const std::string_view rest = unit.substr(scale.unit.size());
    return rest.empty() || rest.front() == ',' || rest.front() == '/';
  });
  return found == kScales.end() ? nullptr : found;
}

// "1,131072,131072,64,8,128,128" as "1,128k,128k,64,8,128,128".
std::string short_sizes(const std::string& sizes) {
  constexpr std::int64_t kKilo = 1024;
  std::string text;
  for (const std::string_view one : split(sizes, ',')) {
    const std::int64_t size = number_of<std::int64_t>(one).value_or(0);
    if (!text.empty()) text += ',';
    if (size > 0 && size % (kKilo * kKilo) == 0) {
      text += fmt::format("{}M", size / (kKilo * kKilo));
    } else if (size > 0 && size % kKilo == 0) {
      text += fmt::format("{}k", size / kKilo);
    } else {
      text += one;
    }
  }
  return text;
}

// The columns that a text takes on a terminal, one for each code point of UTF-8 ("µs" is two).
int display_width(std::string_view text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
  }));
}

void write_cell(std::ostream& out, std::string_view text, int width) {
  out << std::string(static_cast<std::size_t>(std::max(0, width - display_width(text))), ' ')
      << text;
}

}  // namespace

TableLayout::TableLayout(std::span<const Column> columns, std::span<const Row> rows,
                         TableStyle style)
    : columns_(columns), style_(style) {
  for (std::size_t i = 0; i < columns.size(); ++i) shown_.push_back({i, columns[i].unit});
  choose_units(rows);
  for (Shown& shown : shown_) {
    const Column& column = columns_[shown.column];
    const int unit = shown.unit.empty() ? 0 : display_width(shown.unit) + 2;
    shown.width = std::max({column.width, display_width(column.name), unit});
    for (const Row& row : rows)
      shown.width = std::max(shown.width, display_width(cell(shown, row)));
  }
  if (!style_.wide) drop_columns();
}

void TableLayout::choose_units(std::span<const Row> rows) {
  const auto largest = [&](std::size_t column) {
    double most = 0;
    for (const Row& row : rows)
      most = std::max(most, std::abs(number_of<double>(row[column]).value_or(0)));
    return most;
  };
  for (Shown& shown : shown_) {
    const std::string& unit = columns_[shown.column].unit;
    const Scale* scale = scale_of(unit);
    if (scale == nullptr) continue;
    double most = 0;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      const bool counts = scale->together ? columns_[i].unit == unit : i == shown.column;
      if (counts) most = std::max(most, largest(i));
    }
    if (most < scale->from) continue;
    shown.unit = std::string(scale->next) + unit.substr(scale->unit.size());
    shown.divisor = scale->divisor;
    shown.digits = scale->digits;
  }
}

int TableLayout::total_width() const {
  int total = 1;
  for (const Shown& shown : shown_) total += 1 + shown.width;
  return total;
}

void TableLayout::drop_columns() {
  const auto leaves = [&](const Shown& shown) { return columns_[shown.column].leaves; };
  while (total_width() > TableStyle::kWidth) {
    // The last of the columns that leave first.
    auto first = shown_.end();
    for (auto it = shown_.begin(); it != shown_.end(); ++it) {
      if (leaves(*it) > 0 && (first == shown_.end() || leaves(*it) >= leaves(*first))) first = it;
    }
    if (first == shown_.end()) return;
    shown_.erase(first);
  }
}

std::string TableLayout::cell(const Shown& shown, const Row& row) const {
  const std::string& text = row[shown.column];
  if (columns_[shown.column].unit.starts_with("B,T,S")) return short_sizes(text);
  const auto number = number_of<double>(text);
  if (shown.divisor == 1 || !number) return text;
  return fmt::format("{:.{}f}", *number / shown.divisor, shown.digits);
}

void TableLayout::write_header(std::ostream& out) const {
  if (style_.legend) {
    for (const Shown& shown : shown_) {
      const Column& column = columns_[shown.column];
      if (!column.meaning.empty()) out << "# " << column.name << ": " << column.meaning << '\n';
    }
  }
  std::string hidden;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    const bool shown = std::any_of(shown_.begin(), shown_.end(),
                                   [&](const Shown& one) { return one.column == i; });
    if (!shown) hidden += (hidden.empty() ? "" : ", ") + columns_[i].name;
  }
  if (!hidden.empty()) out << "# only with --wide: " << hidden << '\n';
  out << "#\n";
  for (const bool units : {false, true}) {
    out << '#';
    for (const Shown& shown : shown_) {
      out << ' ';
      const std::string unit = shown.unit.empty() ? "" : "(" + shown.unit + ")";
      write_cell(out, units ? unit : columns_[shown.column].name, shown.width);
    }
    out << '\n';
  }
}

void TableLayout::write_row(std::ostream& out, const Row& row) const {
  out << ' ';
  for (const Shown& shown : shown_) {
    out << ' ';
    write_cell(out, cell(shown, row), shown.width);
  }
  out << '\n';
}

}  // namespace annulus::launcher
