#include "launcher/report/report.hpp"

#include <algorithm>
#include <cmath>
#include <ostream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>

#include "launcher/report/number.hpp"

namespace annulus::launcher {
namespace {

using nlohmann::json;

void write_meta(std::ostream& out, const std::pair<std::string, std::string>& meta) {
  out << "# " << meta.first << ": " << meta.second << '\n';
}

// Throws at once, so that long work does not go on for a table that cannot be written.
void flush_followed(std::ostream& out) {
  if (!out.flush()) throw LibraryError("standard output: cannot be written in full");
}

json json_of(const std::string& cell) {
  if (cell == kNothing) return nullptr;
  if (const auto integer = number_of<std::int64_t>(cell)) return *integer;
  const auto real = number_of<double>(cell);
  return real && std::isfinite(*real) ? json(*real) : json(cell);
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

}  // namespace

std::string counted(std::int64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

Report::Report(std::string command, Record record, std::vector<Column> columns, TableStyle style)
    : command_(std::move(command)),
      record_(std::move(record)),
      columns_(std::move(columns)),
      style_(style) {}

void Report::add_meta(std::string key, std::string value) {
  const std::pair pair(std::move(key), std::move(value));
  if (std::find(meta_.begin(), meta_.end(), pair) != meta_.end()) return;
  meta_.push_back(pair);
  if (follower_ != nullptr) write_meta(*follower_, pair);
}

std::vector<std::pair<std::string, std::string>> Report::about() const {
  auto about = meta_;
  for (const RecordField& field : record_) about.emplace_back(field.name, text_of(field));
  return about;
}

void Report::add_row(Row cells) {
  if (cells.size() != columns_.size()) {
    throw InternalError(
        fmt::format("report: a row of {} cells for {} columns", cells.size(), columns_.size()));
  }
  rows_.push_back(std::move(cells));
  if (follower_ == nullptr) return;
  if (!followed_) begin_table(*follower_, rows_);
  followed_->write_row(*follower_, rows_.back());
  flush_followed(*follower_);
}

void Report::set_verdict(std::string verdict, bool passed) {
  verdict_ = std::move(verdict);
  passed_ = passed;
  if (follower_ == nullptr) return;
  if (!followed_) begin_table(*follower_, rows_);
  *follower_ << "# Verdict: " << verdict_ << '\n';
  flush_followed(*follower_);
}

void Report::begin_table(std::ostream& out, std::span<const Row> rows) {
  followed_.emplace(columns_, rows, style_);
  followed_->write_header(out);
}

void Report::write_table(std::ostream& out) const {
  for (const auto& pair : meta_) write_meta(out, pair);
  const TableLayout layout(columns_, rows_, style_);
  layout.write_header(out);
  for (const Row& row : rows_) layout.write_row(out, row);
  if (!verdict_.empty()) out << "# Verdict: " << verdict_ << '\n';
}

void Report::follow(std::ostream& out, const std::optional<Row>& typical) {
  follower_ = &out;
  for (const auto& pair : meta_) write_meta(out, pair);
  if (typical) begin_table(out, {&*typical, 1});
  flush_followed(out);
}

json Report::to_json() const {
  json meta = json::object();
  for (const auto& [key, value] : meta_) meta[key] = value;
  json columns = json::array();
  for (const RecordField& field : record_) {
    columns.push_back({{"name", field.name}, {"unit", ""}, {"meaning", ""}});
  }
  for (const Column& column : columns_) {
    columns.push_back({{"name", column.name}, {"unit", column.unit}, {"meaning", column.meaning}});
  }
  json record = json::object();
  for (const RecordField& field : record_) {
    std::visit([&](const auto& value) { record[field.name] = value; }, field.value);
  }
  json rows = json::array();
  for (const Row& cells : rows_) {
    json row = record;
    for (std::size_t i = 0; i < cells.size(); ++i) row[columns_[i].name] = json_of(cells[i]);
    rows.push_back(std::move(row));
  }
  return {
      {"schema", "annulus." + command_}, {"version", kSchemaVersion},
      {"meta", std::move(meta)},         {"columns", std::move(columns)},
      {"rows", std::move(rows)},         {"verdict", {{"passed", passed_}, {"text", verdict_}}}};
}

std::string Report::csv_header() const {
  std::string line = "schema";
  for (const RecordField& field : record_) line += ',' + csv_quoted(field.name);
  for (const Column& column : columns_) {
    const std::string unit = column.unit.empty() ? "" : " (" + column.unit + ")";
    line += ',' + csv_quoted(column.name + unit);
  }
  return line;
}

std::string Report::csv_rows(std::size_t first) const {
  std::string begin = fmt::format("annulus.{}/{}", command_, kSchemaVersion);
  for (const RecordField& field : record_) begin += ',' + csv_quoted(text_of(field));
  std::string text;
  for (const Row& cells : std::span(rows_).subspan(std::min(first, rows_.size()))) {
    text += begin;
    for (const std::string& cell : cells) text += ',' + (cell == kNothing ? "" : csv_quoted(cell));
    text += "\r\n";
  }
  return text;
}

}  // namespace annulus::launcher
