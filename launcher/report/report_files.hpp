#pragma once

#include <iosfwd>
#include <optional>
#include <string>

#include <annulus/files/text_file.hpp>

#include "launcher/report/report.hpp"

namespace annulus::launcher {

/// A CSV file that rows are added to: a new one appears complete under its name or not at all, and
/// one that exists gets all rows or none. Several jobs may add to one file at a time, except over
/// network file systems without locks. For one rank.
class CsvFile {
 public:
  /// Throws FileError at once for a path that cannot be written, or for a file whose first line is
  /// not `header`.
  CsvFile(std::string path, std::string header);
  /// Once. Throws FileError as above, SystemError.
  void add(const std::string& rows);

 private:
  [[nodiscard]] files::FileDescriptor open_existing() const;
  void check_header(const files::FileDescriptor& file) const;

  std::string path_;
  std::string header_;
  std::optional<files::TextFile> fresh_;  // if there was no file
};

/// Where --json and --csv send a report: a file, or standard output for "-". A JSON file is
/// replaced, rows of CSV are added to those that are there. For one rank.
class ReportFiles {
 public:
  /// Empty paths: nowhere. Opens the files, so that an impossible name, or a CSV file with other
  /// columns than the report's, fails before the work. Throws UserError naming the option.
  ReportFiles(const std::string& json_path, const std::string& csv_path, const Report& report);
  /// True if the table must give way on standard output.
  [[nodiscard]] bool replace_table() const noexcept { return json_to_output_ || csv_to_output_; }
  /// Once. Throws UserError or LibraryError naming the option.
  void write(const Report& report, std::ostream& out);

 private:
  bool json_to_output_;
  bool csv_to_output_;
  std::string json_shown_;
  std::string csv_shown_;
  std::optional<files::TextFile> json_;
  std::optional<CsvFile> csv_;
};

}  // namespace annulus::launcher
