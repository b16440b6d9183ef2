#include "launcher/report/report_files.hpp"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <ostream>
#include <span>
#include <string_view>
#include <sys/file.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>

#include "launcher/options/as_option.hpp"
#include "launcher/report/interruption.hpp"

namespace annulus::launcher {
namespace {

// Longer than any header; the rest of the file does not matter.
constexpr std::int64_t kLongestHeader = 64 << 10;
constexpr std::string_view kLineEnd = "\r\n";

std::string text_of(const nlohmann::json& whole) {
  // Names of files in options need not be UTF-8.
  return whole.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + '\n';
}

std::string unfinished_text(const Report& report) {
  nlohmann::json whole = report.to_json();
  whole["verdict"] = {
      {"passed", false},
      {"text", fmt::format("unfinished after {}",
                           counted(static_cast<std::int64_t>(report.rows()), "row"))}};
  return text_of(whole);
}

std::string read_text(const files::FileDescriptor& file, const std::string& path,
                      std::int64_t begin, std::int64_t end) {
  std::string text(static_cast<std::size_t>(end - begin), '\0');
  files::read_at(file, path, begin, std::as_writable_bytes(std::span(text)));
  return text;
}

// The raw cells of a header line; commas inside quotes do not separate cells.
std::vector<std::string_view> cells_of(std::string_view line) {
  std::vector<std::string_view> cells;
  bool quoted = false;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '"') quoted = !quoted;
    if (line[i] != ',' || quoted) continue;
    cells.push_back(line.substr(begin, i - begin));
    begin = i + 1;
  }
  cells.push_back(line.substr(begin));
  return cells;
}

// Describes the first difference between two headers.
std::string difference(std::string_view found, std::string_view expected) {
  const auto theirs = cells_of(found);
  const auto ours = cells_of(expected);
  for (std::size_t i = 0; i < std::max(theirs.size(), ours.size()); ++i) {
    const auto name = [&](const auto& cells) {
      return i < cells.size() ? fmt::format("'{}'", cells[i]) : std::string("missing");
    };
    if (name(theirs) == name(ours)) continue;
    return fmt::format("column {} is {}, expected {}", i + 1, name(theirs), name(ours));
  }
  return "its first line differs";
}

}  // namespace

CsvFile::CsvFile(std::string path, std::string header)
    : path_(std::move(path)), header_(std::move(header)) {
  std::error_code error;
  if (std::filesystem::exists(path_, error)) {
    check_header(open_existing());
  } else {
    fresh_.emplace(path_);
  }
}

files::FileDescriptor CsvFile::open_existing() const {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path_, error)) {
    throw FileError(path_, "cannot be written: exists and is not a regular file");
  }
  files::FileDescriptor file(::open(path_.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) throw FileError(path_, std::string("cannot be written: ") + std::strerror(errno));
  return file;
}

void CsvFile::check_header(const files::FileDescriptor& file) const {
  const std::int64_t size = files::file_size(file, path_);
  if (size == 0) return;
  std::string line = read_text(file, path_, 0, std::min(size, kLongestHeader));
  line.resize(std::min(line.find('\n'), line.size()));
  if (line.ends_with('\r')) line.pop_back();
  if (line == header_) return;
  throw FileError(path_, fmt::format("cannot be added to: {} (rows are added only to a file with "
                                     "the same columns; name another one)",
                                     difference(line, header_)));
}

void CsvFile::add(const std::string& rows) {
  const bool made = fresh_ && fresh_->commit_if_new(header_ + std::string(kLineEnd) + rows);
  fresh_.reset();  // the file is there now; perhaps another job was first
  if (made) return;
  const files::FileDescriptor file = open_existing();
  if (::flock(file.get(), LOCK_EX) != 0 && errno != ENOLCK && errno != EOPNOTSUPP) {
    throw SystemError("lock " + path_, errno);
  }
  check_header(file);
  const std::int64_t size = files::file_size(file, path_);
  std::string text = rows;
  if (size == 0) {
    text = header_ + std::string(kLineEnd) + rows;
  } else if (read_text(file, path_, size - 1, size) != "\n") {
    text = std::string(kLineEnd) + rows;
  }
  try {
    files::write_at(file, path_, size, std::as_bytes(std::span(text)));
    files::sync(file, path_);
  } catch (const SystemError&) {
    static_cast<void>(::ftruncate(file.get(), size));  // all rows or none
    throw;
  }
}

ReportFiles::ReportFiles(const std::string& json_path, const std::string& csv_path,
                         const Report& report)
    : json_to_output_(json_path == kNothing),
      csv_to_output_(csv_path == kNothing),
      json_path_(json_path),
      json_shown_("--json " + json_path),
      csv_shown_("--csv " + csv_path) {
  if (!json_path.empty() && !json_to_output_) {
    as_option(json_shown_, [&] { json_.emplace(json_path); });
  }
  if (!csv_path.empty() && !csv_to_output_) {
    as_option(csv_shown_, [&] { csv_.emplace(csv_path, report.csv_header()); });
  }
}

void ReportFiles::write_csv(const Report& report, std::ostream& out) {
  const std::string rows = report.csv_rows(csv_rows_);
  if (csv_to_output_) {
    if (csv_rows_ == 0) out << report.csv_header() << kLineEnd;
    out << rows;
  }
  if (csv_ && (csv_rows_ == 0 || !rows.empty())) as_option(csv_shown_, [&] { csv_->add(rows); });
  csv_rows_ = report.rows();
}

void ReportFiles::keep(const Report& report, std::ostream& out) {
  if (json_to_output_) print_when_interrupted(unfinished_text(report));
  write_csv(report, out);
  out.flush();
  if (json_) {
    unfinished_ = json_path_ + ".unfinished";
    as_option(json_shown_, [&] { files::TextFile(unfinished_).commit(unfinished_text(report)); });
    rows_are_kept("kept in " + unfinished_);
  } else {
    rows_are_kept(csv_ || replace_table() ? "kept" : "");
  }
}

void ReportFiles::write(const Report& report, std::ostream& out) {
  if (json_to_output_) {
    print_when_interrupted("");
    out << text_of(report.to_json());
  }
  write_csv(report, out);
  out.flush();
  if (json_) as_option(json_shown_, [&] { json_->commit(text_of(report.to_json())); });
  std::error_code error;  // the report is written, whatever happens to the other file
  if (!unfinished_.empty()) std::filesystem::remove(unfinished_, error);
}

}  // namespace annulus::launcher
