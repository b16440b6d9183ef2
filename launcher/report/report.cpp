#include "launcher/report/report.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <sstream>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>

#include "launcher/options/as_option.hpp"

namespace annulus::launcher {
namespace {

constexpr std::string_view kNothing = "-";

// What a terminal shows, taking each code point of the UTF-8 text for one column ("µs" is two).
int display_width(std::string_view text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
  }));
}

void write_meta(std::ostream& out, const std::pair<std::string, std::string>& meta) {
  out << "# " << meta.first << ": " << meta.second << '\n';
}

void write_cell(std::ostream& out, std::string_view text, int width) {
  out << std::string(static_cast<std::size_t>(std::max(0, width - display_width(text))), ' ')
      << text;
}

void write_row(std::ostream& out, const std::vector<std::string>& cells,
               const std::vector<int>& widths) {
  out << ' ';
  for (std::size_t i = 0; i < cells.size(); ++i) {
    out << ' ';
    write_cell(out, cells[i], widths[i]);
  }
  out << '\n';
}

// Work of hours must not go on for a table that nobody will see.
void flush_followed(std::ostream& out) {
  if (!out.flush()) throw LibraryError("standard output: cannot be written in full");
}

template <class Number>
bool reads_as(const std::string& cell, Number& number) {
  const char* end = cell.data() + cell.size();
  const auto [stop, error] = std::from_chars(cell.data(), end, number);
  return error == std::errc() && stop == end;
}

nlohmann::json json_of(const std::string& cell) {
  if (cell == kNothing) return nullptr;
  std::int64_t integer = 0;
  if (reads_as(cell, integer)) return integer;
  double real = 0;
  if (reads_as(cell, real) && std::isfinite(real)) return real;
  return cell;
}

std::string csv_quoted(const std::string& cell) {
  if (cell.find_first_of(",\"\r\n") == std::string::npos) return cell;
  std::string quoted = "\"";
  for (const char c : cell) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

void write_json(const Report& report, std::ostream& out) {
  out << report.to_json().dump(2) << '\n';
}

std::optional<files::TextFile> open_unless_output(const char* option, const std::string& path) {
  if (path.empty() || path == kNothing) return std::nullopt;
  return as_option(fmt::format("{} {}", option, path),
                   [&] { return std::optional<files::TextFile>(std::in_place, path); });
}

}  // namespace

std::string counted(std::int64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

Report::Report(std::string command, std::vector<Column> columns)
    : command_(std::move(command)), columns_(std::move(columns)) {}

void Report::add_meta(std::string key, std::string value) {
  const std::pair pair(std::move(key), std::move(value));
  if (std::find(meta_.begin(), meta_.end(), pair) != meta_.end()) return;
  meta_.push_back(pair);
  if (follower_ != nullptr) write_meta(*follower_, pair);
}

void Report::add_row(std::vector<std::string> cells) {
  if (cells.size() != columns_.size()) {
    throw InternalError(
        fmt::format("report: a row of {} cells for {} columns", cells.size(), columns_.size()));
  }
  rows_.push_back(std::move(cells));
  if (follower_ == nullptr) return;
  write_row(*follower_, rows_.back(), follower_widths_);
  flush_followed(*follower_);
}

void Report::set_verdict(std::string verdict, bool passed) {
  verdict_ = std::move(verdict);
  passed_ = passed;
  if (follower_ != nullptr) write_verdict(*follower_);
}

Report Report::in_readable_units() const {
  constexpr double kLongest = 10e3;  // ms
  Report shown = *this;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    std::string& unit = shown.columns_[i].unit;
    const auto milliseconds = [i](const std::vector<std::string>& cells) {
      double number = 0;
      return reads_as(cells[i], number) ? number : 0;
    };
    if (!unit.starts_with("ms") || std::none_of(rows_.begin(), rows_.end(), [&](const auto& row) {
          return milliseconds(row) >= kLongest;
        })) {
      continue;
    }
    unit.erase(0, 1);
    for (auto& row : shown.rows_) {
      if (row[i] != kNothing) row[i] = fmt::format("{:.3f}", milliseconds(row) * 1e-3);
    }
  }
  return shown;
}

std::vector<int> Report::widths() const {
  std::vector<int> widths;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    const Column& column = columns_[i];
    const int unit = column.unit.empty() ? 0 : display_width(column.unit) + 2;
    int width = std::max({column.width, display_width(column.name), unit});
    for (const auto& row : rows_) width = std::max(width, display_width(row[i]));
    widths.push_back(width);
  }
  return widths;
}

void Report::write_header(std::ostream& out, const std::vector<int>& widths) const {
  for (const auto& pair : meta_) write_meta(out, pair);
  out << "#\n";
  for (const bool units : {false, true}) {
    out << '#';
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      const Column& column = columns_[i];
      out << ' ';
      if (units) {
        write_cell(out, column.unit.empty() ? "" : "(" + column.unit + ")", widths[i]);
      } else {
        write_cell(out, column.name, widths[i]);
      }
    }
    out << '\n';
  }
}

void Report::write_verdict(std::ostream& out) const {
  if (!verdict_.empty()) out << "# Verdict: " << verdict_ << std::endl;
}

void Report::write_table(std::ostream& out) const {
  const Report shown = in_readable_units();
  const std::vector<int> widths = shown.widths();
  shown.write_header(out, widths);
  for (const auto& row : shown.rows_) write_row(out, row, widths);
  write_verdict(out);
}

void Report::follow(std::ostream& out) {
  follower_ = &out;
  follower_widths_ = widths();
  write_header(out, follower_widths_);
  for (const auto& row : rows_) write_row(out, row, follower_widths_);
  flush_followed(out);
}

nlohmann::json Report::to_json() const {
  using nlohmann::json;
  json meta = json::object();
  for (const auto& [key, value] : meta_) meta[key] = value;
  json columns = json::array();
  for (const Column& column : columns_) {
    columns.push_back({{"name", column.name}, {"unit", column.unit}});
  }
  json rows = json::array();
  for (const auto& cells : rows_) {
    json row = json::object();
    for (std::size_t i = 0; i < cells.size(); ++i) row[columns_[i].name] = json_of(cells[i]);
    rows.push_back(std::move(row));
  }
  return {
      {"schema", "annulus." + command_}, {"version", kSchemaVersion},
      {"meta", std::move(meta)},         {"columns", std::move(columns)},
      {"rows", std::move(rows)},         {"verdict", {{"passed", passed_}, {"text", verdict_}}}};
}

void Report::write_csv(std::ostream& out) const {
  const std::string schema = fmt::format("annulus.{}/{}", command_, kSchemaVersion);
  out << "schema";
  for (const Column& column : columns_) {
    const std::string unit = column.unit.empty() ? "" : " (" + column.unit + ")";
    out << ',' << csv_quoted(column.name + unit);
  }
  out << "\r\n";
  for (const auto& cells : rows_) {
    out << schema;
    for (const std::string& cell : cells) out << ',' << (cell == kNothing ? "" : csv_quoted(cell));
    out << "\r\n";
  }
}

ReportFiles::ReportFiles(const std::string& json_path, const std::string& csv_path)
    : json_to_output_(json_path == kNothing),
      csv_to_output_(csv_path == kNothing),
      json_(open_unless_output("--json", json_path)),
      csv_(open_unless_output("--csv", csv_path)) {}

void ReportFiles::write(const Report& report, std::ostream& out) {
  if (json_to_output_) write_json(report, out);
  if (csv_to_output_) report.write_csv(out);
  out.flush();
  std::ostringstream json;
  std::ostringstream csv;
  write_json(report, json);
  report.write_csv(csv);
  if (json_) json_->commit(json.str());
  if (csv_) csv_->commit(csv.str());
}

}  // namespace annulus::launcher
