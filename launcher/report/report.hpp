#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include <annulus/files/text_file.hpp>

namespace annulus::launcher {

/// "1 node", "2 nodes".
[[nodiscard]] std::string counted(std::int64_t count, const char* what);

/// A table in the manner of nccl-tests: "#" lines of meta data, two header rows (names, units), one
/// row per case, a verdict at the end. The same rows go to JSON and CSV.
class Report {
 public:
  /// Version of the JSON and CSV layout; rises when a column changes its meaning.
  static constexpr int kSchemaVersion = 1;

  struct Column {
    std::string name;  ///< "time", also the JSON key
    std::string unit;  ///< "ms", "" if it has none
    int width = 10;    ///< at least; wider names, units and cells widen it
  };

  /// `command` names the schema: "bench" makes "annulus.bench".
  Report(std::string command, std::vector<Column> columns);

  /// "# key: value" before the table; once follow() has begun, right where it is. A later value of
  /// the same key replaces an earlier one in JSON; the very same pair is taken once.
  void add_meta(std::string key, std::string value);
  /// One cell per column, already formatted for the table; "-" where a column does not apply.
  /// Throws InternalError for another number of cells.
  void add_row(std::vector<std::string> cells);
  /// The footer: "OK (200 of 200 within bounds)".
  void set_verdict(std::string verdict, bool passed);
  [[nodiscard]] bool passed() const noexcept { return passed_; }

  /// Everything at once, columns as wide as their widest cell. Columns in ms that reach 10 s are
  /// shown in s; JSON and CSV, for programs, never change units.
  void write_table(std::ostream& out) const;
  /// The same line by line: prints meta data and header now, each row as it is added (columns
  /// cannot widen any more), and the verdict when it is set. `out` must outlive the report.
  void follow(std::ostream& out);

  /// {"schema": "annulus.bench", "version": 1, "meta": {…}, "columns": [{"name", "unit"}, …],
  /// "rows": [{name: cell, …}, …], "verdict": {"passed": true, "text": "…"}}. Cells that read as
  /// finite numbers are numbers, "-" is null, everything else a string.
  [[nodiscard]] nlohmann::json to_json() const;
  /// RFC 4180, without comment lines: a header "schema,index,time (ms),…", then the rows. The first
  /// column is "annulus.bench/1" in each row, so that files can be joined. Empty for "-".
  void write_csv(std::ostream& out) const;

 private:
  [[nodiscard]] Report in_readable_units() const;
  [[nodiscard]] std::vector<int> widths() const;
  void write_header(std::ostream& out, const std::vector<int>& widths) const;
  void write_verdict(std::ostream& out) const;

  std::string command_;
  std::vector<Column> columns_;
  std::vector<std::pair<std::string, std::string>> meta_;
  std::vector<std::vector<std::string>> rows_;
  std::string verdict_;
  bool passed_ = true;
  std::ostream* follower_ = nullptr;
  std::vector<int> follower_widths_;
};

/// Where --json and --csv send a report: a file, which appears complete or not at all, or standard
/// output for "-". For one rank.
class ReportFiles {
 public:
  /// Empty paths: nowhere. Opens the files, so that an impossible name fails before the work.
  /// Throws UserError naming the option.
  ReportFiles(const std::string& json_path, const std::string& csv_path);
  /// Whether the table must give way on standard output.
  [[nodiscard]] bool replace_table() const noexcept { return json_to_output_ || csv_to_output_; }
  /// Once. Throws SystemError.
  void write(const Report& report, std::ostream& out);

 private:
  bool json_to_output_;
  bool csv_to_output_;
  std::optional<files::TextFile> json_;
  std::optional<files::TextFile> csv_;
};

}  // namespace annulus::launcher
