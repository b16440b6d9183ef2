#include "schedules/building/gather_routes.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <span>
#include <utility>

namespace annulus::ring {
namespace {

// If each piece is a message, a receiver can place all of them in order of position. If that would
// be too many messages, neighbouring pieces share one.
bool is_one_each(std::span<const ColumnPiece> pieces) {
  return pieces.size() <= KvNeeds::kMaximumMessages;
}

void sort_by_position(std::vector<GatherMessage>& messages) {
  std::stable_sort(
      messages.begin(), messages.end(),
      [](const GatherMessage& a, const GatherMessage& b) { return a.start() < b.start(); });
}

}  // namespace

LocalRange GatherMessage::columns() const {
  const LocalPosition begin = pieces.front().columns.begin;
  return {begin, pieces.back().columns.end() - begin};
}

GatherRoutes::GatherRoutes(const KvNeeds& needs, const GroupNodes& nodes)
    : needs_(needs),
      nodes_(nodes),
      direct_(nodes.are_linked_alike(needs.size(), [](int member) { return member; })) {}

std::vector<GatherMessage> GatherRoutes::to(int receiver) const {
  std::vector<GatherMessage> messages;
  for (int origin = 0; origin < needs_.size(); ++origin) {
    if (origin == receiver) continue;
    std::ranges::move(between(origin, receiver), std::back_inserter(messages));
  }
  sort_by_position(messages);
  return messages;
}

std::vector<GatherMessage> GatherRoutes::from(int sender) const {
  const std::vector<int> origins = passed_on(sender);
  std::vector<GatherMessage> messages;
  for (int turn = 1; turn < needs_.size(); ++turn) {
    const int receiver = (sender + turn) % needs_.size();
    std::vector<GatherMessage> sent = between(sender, receiver);
    if (nodes_.node_of(receiver) == nodes_.node_of(sender)) {
      for (const int origin : origins) {
        std::ranges::move(between(origin, receiver), std::back_inserter(sent));
      }
    }
    std::erase_if(sent, [&](const GatherMessage& message) { return message.source != sender; });
    sort_by_position(sent);
    std::ranges::move(sent, std::back_inserter(messages));
  }
  return messages;
}

std::vector<GatherMessage> GatherRoutes::between(int origin, int receiver) const {
  const int node = nodes_.node_of(receiver);
  const int distance = (node + nodes_.count() - nodes_.node_of(origin)) % nodes_.count();
  const std::span<const ColumnPiece> pieces = needs_.of(receiver, origin);
  std::vector<GatherMessage> messages;
  const auto add = [&](std::vector<ColumnPiece> neighbours) {
    GatherMessage& message =
        messages.emplace_back(GatherMessage{origin, receiver, origin, 0, std::move(neighbours)});
    if (direct_ || distance == 0) return;
    const int first = entry(node, origin, message.columns());
    message.step = distance - 1;
    if (first == receiver) return;
    message.source = first;
    ++message.step;
  };
  if (is_one_each(pieces)) {
    for (const ColumnPiece& piece : pieces) add({piece});
  } else {
    for (std::vector<ColumnPiece>& neighbours : joined(pieces)) add(std::move(neighbours));
  }
  return messages;
}

// The message that carries all of these columns to a member; empty if there is none.
LocalRange GatherRoutes::held(int member, int origin, const LocalRange& columns) const {
  const std::span<const ColumnPiece> pieces = needs_.of(member, origin);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    LocalRange message = pieces[i].columns;
    while (!is_one_each(pieces) && i + 1 < pieces.size() &&
           pieces[i + 1].columns.begin == message.end()) {
      message.count += pieces[++i].columns.count;
    }
    if (message.begin <= columns.begin && columns.end() <= message.end()) return message;
  }
  return {};
}

// The member through which these columns of another node enter a node. It gets a whole message from
// the owner, of which these columns are a part.
int GatherRoutes::entry(int node, int origin, const LocalRange& columns) const {
  const std::vector<int>& members = nodes_.members(node);
  const std::vector<int>& at_home = nodes_.members(nodes_.node_of(origin));
  const auto place = static_cast<std::size_t>(
      std::lower_bound(at_home.begin(), at_home.end(), origin) - at_home.begin());
  int first = -1;
  std::int64_t most = 0;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const int member = members[(place + i) % members.size()];
    const std::int64_t count = held(member, origin, columns).count;
    if (count <= most) continue;
    first = member;
    most = count;
  }
  return first;
}

// The origins whose columns a member may pass on, because it gets them straight from another node.
std::vector<int> GatherRoutes::passed_on(int member) const {
  std::vector<int> origins;
  if (direct_) return origins;
  for (int origin = 0; origin < needs_.size(); ++origin) {
    if (nodes_.node_of(origin) == nodes_.node_of(member)) continue;
    const std::vector<GatherMessage> got = between(origin, member);
    const bool first = std::any_of(got.begin(), got.end(), [](const GatherMessage& message) {
      return message.source == message.origin;
    });
    if (first) origins.push_back(origin);
  }
  return origins;
}

}  // namespace annulus::ring
