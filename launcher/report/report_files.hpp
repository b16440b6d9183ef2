#pragma once

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
  /// To be called once. Throws FileError as above, SystemError.
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
  /// To be called once. Throws UserError or LibraryError naming the option.
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
