#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "launcher/report/record.hpp"
#include "launcher/report/table.hpp"

namespace annulus::launcher {

/// "1 node", "2 nodes".
[[nodiscard]] std::string counted(std::int64_t count, const char* what);

/// A table in the manner of nccl-tests: "#" lines of meta data, two header rows (names, units), one
/// row per case, a verdict at the end. The same rows go to JSON and CSV, where each is
/// self-contained: it begins with the record, which says where and how it was made.
class Report {
 public:
  /// Version of the JSON and CSV layout; rises when a column changes its meaning.
  static constexpr int kSchemaVersion = 2;

  /// `command` names the schema: "bench" makes "annulus.bench". Columns and fields of the record
  /// must have different names.
  Report(std::string command, Record record, std::vector<Column> columns, TableStyle style);

  /// Adds a line "# key: value" before the table; after follow(), prints it at once. In JSON, a
  /// later value of a key replaces an earlier one. Equal pairs are added once.
  void add_meta(std::string key, std::string value);
  /// Throws InternalError for another number of cells than there are columns.
  void add_row(Row cells);
  /// The footer: "OK (200 of 200 within bounds)".
  void set_verdict(std::string verdict, bool passed);
  [[nodiscard]] bool passed() const noexcept { return passed_; }
  /// Meta data, then the fields of the record.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> about() const;

  /// Writes the whole table, laid out for all rows.
  void write_table(std::ostream& out) const;
  /// Writes the table line by line: meta data now, each row when it is added, and the verdict when
  /// it is set. The first row, or the verdict, determines the layout. With a row like `typical`,
  /// the header comes at once, in units and widths that suit it. `out` must outlive the report.
  /// Throws LibraryError once `out` cannot be written. To be called before the first row.
  void follow(std::ostream& out, const std::optional<Row>& typical = {});

  /// {"schema": "annulus.bench", "version": 2, "meta": {…}, "columns": [{"name", "unit",
  /// "meaning"}, …], "rows": [{name: cell, …}, …], "verdict": {"passed": true, "text": "…"}}. Cells
  /// that read as finite numbers are numbers, "-" is null, everything else a string.
  [[nodiscard]] nlohmann::json to_json() const;
  /// One line of RFC 4180: "schema,date,…,time (ms),…", without the line's end.
  [[nodiscard]] std::string csv_header() const;
  /// The rows from number `first` on, a line each. The first column is "annulus.bench/2". A cell
  /// "-" is empty.
  [[nodiscard]] std::string csv_rows(std::size_t first = 0) const;
  [[nodiscard]] std::size_t rows() const noexcept { return rows_.size(); }
  [[nodiscard]] const std::vector<Column>& columns() const noexcept { return columns_; }

 private:
  void begin_table(std::ostream& out, std::span<const Row> rows);

  std::string command_;
  Record record_;
  std::vector<Column> columns_;
  TableStyle style_;
  std::vector<std::pair<std::string, std::string>> meta_;
  std::vector<Row> rows_;
  std::string verdict_;
  bool passed_ = true;
  std::ostream* follower_ = nullptr;
  std::optional<TableLayout> followed_;  // once the table has begun
};

}  // namespace annulus::launcher
