#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <annulus/core/chrome_trace.hpp>

namespace annulus {
namespace {

using nlohmann::json;

// The row of a span before overlapping spans are separated.
std::string row_of(const TraceSpan& span) {
  const auto& messages = span.label.messages;
  const auto incoming =
      std::count_if(messages.begin(), messages.end(), [](const auto& m) { return m.incoming; });
  if (messages.empty()) return span.stream;
  if (incoming == 0) return span.stream + ", sends";
  if (static_cast<std::size_t>(incoming) == messages.size()) return span.stream + ", receives";
  return span.stream;
}

// A row of the viewer, whose spans must be nested or disjoint.
class Lane {
 public:
  // Spans must come in order of begin, longer ones first.
  bool take(const TraceSpan& span) {
    while (!open_.empty() && open_.back() <= span.begin_ns) open_.pop_back();
    if (!open_.empty() && open_.back() < span.end_ns) return false;
    open_.push_back(span.end_ns);
    return true;
  }

 private:
  std::vector<std::int64_t> open_;  // ends of the spans that enclose the next one
};

// One rank's rows, and the row of each span.
struct Rows {
  std::vector<std::string> names;
  std::vector<std::size_t> of_span;
};

Rows rows_of(const std::vector<TraceSpan>& spans) {
  std::vector<std::size_t> order(spans.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(spans[a].begin_ns, -spans[a].end_ns) <
           std::pair(spans[b].begin_ns, -spans[b].end_ns);
  });
  std::map<std::string, std::vector<Lane>> lanes;
  std::vector<std::pair<std::string, std::size_t>> place(spans.size());  // row and lane
  for (const std::size_t i : order) {
    const std::string row = row_of(spans[i]);
    std::vector<Lane>& of_row = lanes[row];
    std::size_t lane = 0;
    while (lane < of_row.size() && !of_row[lane].take(spans[i])) ++lane;
    if (lane == of_row.size()) of_row.emplace_back().take(spans[i]);
    place[i] = {row, lane};
  }
  Rows rows;
  std::map<std::string, std::size_t> first;
  for (const auto& [row, of_row] : lanes) {
    first[row] = rows.names.size();
    for (std::size_t lane = 0; lane < of_row.size(); ++lane) {
      rows.names.push_back(lane == 0 ? row : fmt::format("{} {}", row, lane + 1));
    }
  }
  for (const auto& [row, lane] : place) rows.of_span.push_back(first[row] + lane);
  return rows;
}

json metadata(const char* what, std::size_t rank, json args) {
  return {{"ph", "M"}, {"name", what}, {"pid", rank}, {"args", std::move(args)}};
}

json args_of(const TraceSpan& span) {
  const TraceLabel& label = span.label;
  json args = json::object();
  if (label.step >= 0) args["step"] = label.step;
  for (const TraceMessage& message : label.messages) {
    const json one{{"rank", message.peer}, {"bytes", message.bytes}};
    args[message.incoming ? "from" : "to"].push_back(one);
  }
  if (span.waited_ns > 0) args["waited_us"] = static_cast<double>(span.waited_ns) * 1e-3;
  return args;
}

class Document {
 public:
  explicit Document(const TraceOfRanks& ranks) : ranks_(ranks) {
    epoch_ = std::numeric_limits<std::int64_t>::max();
    for (const auto& spans : ranks) {
      for (const TraceSpan& span : spans) epoch_ = std::min(epoch_, span.begin_ns);
      rows_.push_back(rows_of(spans));
    }
  }

  [[nodiscard]] std::string text(const json& about) {
    text_ = "{\"displayTimeUnit\": \"ms\",\n\"otherData\": " +
            about.dump(-1, ' ', false, json::error_handler_t::replace) + ",\n\"traceEvents\": [\n";
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) add_rank(rank);
    const std::vector<TraceFlow> flows = flows_of(ranks_);
    for (std::size_t i = 0; i < flows.size(); ++i) add_flow(flows[i], i);
    return text_ + "\n]}\n";
  }

 private:
  void append(const json& event) {
    if (!first_) text_ += ",\n";
    first_ = false;
    text_ += event.dump();
  }

  [[nodiscard]] double microseconds(std::int64_t ns) const {
    return static_cast<double>(ns - epoch_) * 1e-3;
  }

  void add_rank(std::size_t rank) {
    const auto& spans = ranks_[rank];
    if (spans.empty()) return;
    append(metadata("process_name", rank, {{"name", fmt::format("rank {}", rank)}}));
    append(metadata("process_sort_index", rank, {{"sort_index", rank}}));
    const Rows& rows = rows_[rank];
    for (std::size_t row = 0; row < rows.names.size(); ++row) {
      json name = metadata("thread_name", rank, {{"name", rows.names[row]}});
      json order = metadata("thread_sort_index", rank, {{"sort_index", row}});
      name["tid"] = order["tid"] = row;
      append(name);
      append(order);
    }
    for (std::size_t i = 0; i < spans.size(); ++i) {
      const TraceSpan& span = spans[i];
      append({{"ph", "X"},
              {"name", span.label.name},
              {"cat", name_of(span.label.category)},
              {"pid", rank},
              {"tid", rows.of_span[i]},
              {"ts", microseconds(span.begin_ns)},
              {"dur", static_cast<double>(span.end_ns - span.begin_ns) * 1e-3},
              {"args", args_of(span)}});
    }
  }

  // Viewers attach the ends of an arrow to the enclosing spans, so the arrow ends just inside the
  // receiver's. They read identifiers as numbers.
  void add_flow(const TraceFlow& flow, std::size_t id) {
    const TraceSpan& sent = ranks_[flow.sender.rank][flow.sender.span];
    const TraceSpan& received = ranks_[flow.receiver.rank][flow.receiver.span];
    const std::int64_t arrival = std::max(received.begin_ns, received.end_ns - 1);
    if (arrival < sent.begin_ns) return;  // clocks of nodes differ: the arrow would point back
    const json args{{"step", sent.label.step},
                    {"from", flow.sender.rank},
                    {"to", flow.receiver.rank},
                    {"index", flow.index}};
    const auto end = [&](const char* phase, const TraceFlow::Side& side, std::int64_t ns) {
      return json{{"ph", phase},
                  {"name", sent.label.name},
                  {"cat", "transfer"},
                  {"id", id},
                  {"pid", side.rank},
                  {"tid", rows_[side.rank].of_span[side.span]},
                  {"ts", microseconds(ns)},
                  {"args", args}};
    };
    append(end("s", flow.sender, sent.begin_ns));
    json finish = end("f", flow.receiver, arrival);
    finish["bp"] = "e";
    append(finish);
  }

  const TraceOfRanks& ranks_;
  std::int64_t epoch_;
  std::vector<Rows> rows_;  // by rank
  std::string text_;
  bool first_ = true;
};

}  // namespace

std::string chrome_trace(const TraceOfRanks& ranks,
                         const std::vector<std::pair<std::string, std::string>>& about) {
  json information = json::object();
  for (const auto& [key, value] : about) information[key] = value;
  return Document(ranks).text(information);
}

}  // namespace annulus
