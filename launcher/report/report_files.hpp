#pragma once

#include <cstddef>
#include <iosfwd>
#include <optional>
#include <string>

#include <annulus/files/text_file.hpp>

#include "launcher/report/report.hpp"

namespace annulus::launcher {

/// A CSV file that rows are added to. A new file appears complete or not at all, and an existing
/// one gets all rows or none. Several jobs may add to one file at a time, except on network file
/// systems without locks. Not collective.
class CsvFile {
 public:
  /// Throws FileError at once for a path that cannot be written, or for a file whose first line is
  /// not `header`.
  CsvFile(std::string path, std::string header);
  /// Throws FileError as above, and SystemError.
  void add(const std::string& rows);

 private:
  [[nodiscard]] files::FileDescriptor open_existing() const;
  void check_header(const files::FileDescriptor& file) const;

  std::string path_;
  std::string header_;
  std::optional<files::TextFile> fresh_;  // if there was no file
};

/// The destinations of --json and --csv: files, or standard output for "-". A JSON file is
/// replaced; CSV rows are added to existing ones. Not collective.
class ReportFiles {
 public:
  /// Empty paths are skipped. Opens the files, so that an impossible name, or a CSV file with
  /// columns unlike the report's, fails before the work. Throws UserError naming the option.
  ReportFiles(const std::string& json_path, const std::string& csv_path, const Report& report);
  /// True if standard output is not for the table.
  [[nodiscard]] bool replace_table() const noexcept { return json_to_output_ || csv_to_output_; }
  /// Writes the rows so far of a report that takes long. JSON goes to NAME.unfinished, with a
  /// verdict that says so, so that NAME is always complete. Standard output gets rows of CSV at
  /// once, but JSON only if a signal ends the program. Throws UserError or LibraryError naming the
  /// option.
  void keep(const Report& report, std::ostream& out);
  /// Writes the whole report and removes NAME.unfinished; to be called once. Throws as keep() does.
  void write(const Report& report, std::ostream& out);

 private:
  void write_csv(const Report& report, std::ostream& out);

  bool json_to_output_;
  bool csv_to_output_;
  std::string json_path_;
  std::string json_shown_;
  std::string csv_shown_;
  std::size_t csv_rows_ = 0;  // already written
  std::optional<files::TextFile> json_;
  std::string unfinished_;  // the name of unfinished JSON; empty before there is any
  std::optional<CsvFile> csv_;
};

}  // namespace annulus::launcher
