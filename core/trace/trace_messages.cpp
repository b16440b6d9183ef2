#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>
#include <annulus/core/trace_messages.hpp>

namespace annulus {
namespace {

using Side = TraceFlow::Side;

struct Sides {
  std::vector<Side> senders;
  std::vector<Side> receivers;
};

// Indices of the spans in order of their begin.
std::vector<std::size_t> in_order(const std::vector<TraceSpan>& spans) {
  std::vector<std::size_t> order(spans.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return spans[a].begin_ns < spans[b].begin_ns;
  });
  return order;
}

// For every span, the time when both sides had posted its matched messages.
class Readiness {
 public:
  explicit Readiness(const TraceOfRanks& ranks) : ranks_(ranks), messages_(ranks.size()) {
    for (std::size_t r = 0; r < ranks.size(); ++r) messages_[r].resize(ranks[r].size());
    for (const TraceFlow& flow : flows_of(ranks)) {
      const std::int64_t both = std::max(begin(flow.sender), begin(flow.receiver));
      note(of(flow.receiver).incoming, both);
      note(of(flow.sender).outgoing, both);
    }
  }

  // The time when the span's messages began to move; its own begin if too little is known.
  [[nodiscard]] std::int64_t moving_since(const Side& side) const {
    const TraceSpan& span = ranks_[side.rank][side.span];
    const bool receives = std::any_of(span.label.messages.begin(), span.label.messages.end(),
                                      [](const TraceMessage& message) { return message.incoming; });
    const auto wanted =
        std::count_if(span.label.messages.begin(), span.label.messages.end(),
                      [&](const TraceMessage& message) { return message.incoming == receives; });
    const Messages& messages = messages_[side.rank][side.span];
    const First& first = receives ? messages.incoming : messages.outgoing;
    const bool all_known = wanted > 0 && first.count == wanted;
    return all_known && first.ready < span.end_ns ? first.ready : span.begin_ns;
  }

 private:
  struct First {
    std::int64_t ready = 0;  // of the message that was ready first
    std::int64_t count = 0;
  };
  struct Messages {
    First incoming;
    First outgoing;
  };

  static void note(First& first, std::int64_t ready) {
    first.ready = first.count == 0 ? ready : std::min(first.ready, ready);
    ++first.count;
  }
  [[nodiscard]] std::int64_t begin(const Side& side) const {
    return ranks_[side.rank][side.span].begin_ns;
  }
  [[nodiscard]] Messages& of(const Side& side) { return messages_[side.rank][side.span]; }

  const TraceOfRanks& ranks_;
  std::vector<std::vector<Messages>> messages_;  // by rank and span
};

}  // namespace

std::vector<TraceFlow> flows_of(const TraceOfRanks& ranks) {
  std::map<std::tuple<int, std::string, std::size_t, std::size_t>, Sides> table;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const std::size_t i : in_order(ranks[rank])) {
      const TraceLabel& label = ranks[rank][i].label;
      for (const TraceMessage& message : label.messages) {
        const auto peer = static_cast<std::size_t>(message.peer);
        Sides& sides = table[{label.step, label.name, message.incoming ? peer : rank,
                              message.incoming ? rank : peer}];
        (message.incoming ? sides.receivers : sides.senders).push_back({rank, i});
      }
    }
  }
  std::vector<TraceFlow> flows;
  for (const auto& [key, sides] : table) {
    const std::size_t count = std::min(sides.senders.size(), sides.receivers.size());
    for (std::size_t i = 0; i < count; ++i) {
      flows.push_back({sides.senders[i], sides.receivers[i], i});
    }
  }
  return flows;
}

void begin_when_moving(TraceOfRanks& ranks) {
  const TraceOfRanks posted = ranks;
  const Readiness readiness(posted);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (std::size_t i = 0; i < ranks[rank].size(); ++i) {
      TraceSpan& span = ranks[rank][i];
      const std::int64_t begin = readiness.moving_since({rank, i});
      span.waited_ns += begin - span.begin_ns;
      span.begin_ns = begin;
    }
  }
}

std::string pack_spans(const std::vector<TraceSpan>& spans) {
  using nlohmann::json;
  json all = json::array();
  for (const TraceSpan& span : spans) {
    json messages = json::array();
    for (const TraceMessage& message : span.label.messages) {
      messages.push_back({message.peer, message.bytes, message.incoming});
    }
    all.push_back({static_cast<int>(span.label.category), span.label.name, span.label.step,
                   std::move(messages), span.stream, span.begin_ns, span.end_ns, span.waited_ns});
  }
  std::string bytes;
  json::to_cbor(all, bytes);
  return bytes;
}

std::vector<TraceSpan> unpack_spans(const std::string& bytes) {
  using nlohmann::json;
  try {
    std::vector<TraceSpan> spans;
    for (const json& item : json::from_cbor(bytes)) {
      TraceSpan span;
      span.label = {static_cast<TraceCategory>(item.at(0).get<int>()), item.at(1), item.at(2)};
      for (const json& message : item.at(3)) {
        span.label.messages.push_back({message.at(0), message.at(1), message.at(2)});
      }
      span.stream = item.at(4);
      span.begin_ns = item.at(5);
      span.end_ns = item.at(6);
      span.waited_ns = item.at(7);
      spans.push_back(std::move(span));
    }
    return spans;
  } catch (const json::exception& error) {
    throw InternalError(std::string("spans of a trace: ") + error.what());
  }
}

}  // namespace annulus
