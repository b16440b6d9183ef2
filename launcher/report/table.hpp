#pragma once

#include <cstddef>
#include <iosfwd>
#include <span>
#include <string>
#include <vector>

namespace annulus::launcher {

/// A column of a report, in its table and in its records.
struct Column {
  std::string name;       ///< "time", also the JSON key
  std::string unit = {};  ///< "ms", "" if it has none; records keep it, tables may scale it
  int width = 0;          ///< minimum; wider names, units and cells widen it
  /// 0: stays in every table. If a table is too wide, the columns with the largest number leave
  /// first.
  int leaves = 0;
  std::string meaning = {};  ///< for --legend; empty if the name says it
};

/// One cell per column, formatted as for a record; "-" where the column does not apply.
using Row = std::vector<std::string>;
inline constexpr const char* kNothing = "-";

struct TableStyle {
  bool wide = false;    ///< show all columns
  bool legend = false;  ///< say what the columns mean

  static constexpr int kWidth = 120;  ///< of a table without `wide`, if its rows allow
};

/// The columns of a table, their widths and their units. Times, rates and memory have the unit that
/// suits the largest value in the rows that the layout was made for; sizes of shapes have the
/// suffixes of --shape.
class TableLayout {
 public:
  /// `columns` must outlive it.
  TableLayout(std::span<const Column> columns, std::span<const Row> rows, TableStyle style);

  /// Writes the legend, if wanted, the hidden columns, names and units.
  void write_header(std::ostream& out) const;
  void write_row(std::ostream& out, const Row& row) const;

 private:
  struct Shown {
    std::size_t column = 0;
    std::string unit;
    double divisor = 1;
    int digits = 0;  // of a number that is divided
    int width = 0;
  };

  [[nodiscard]] std::string cell(const Shown& shown, const Row& row) const;
  void choose_units(std::span<const Row> rows);
  void drop_columns();
  [[nodiscard]] int total_width() const;

  std::span<const Column> columns_;
  TableStyle style_;
  std::vector<Shown> shown_;
};

}  // namespace annulus::launcher
