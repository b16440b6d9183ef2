#pragma once

#include <functional>
#include <vector>

#include <annulus/ring/prices.hpp>

namespace annulus::ring {

/// The nodes of a group's members.
class GroupNodes {
 public:
  /// `group`: the mesh ranks of the members.
  GroupNodes(const Prices& prices, const std::vector<int>& group);

  /// True if the members are spread over nodes in the same way, whichever nodes these are.
  bool operator==(const GroupNodes&) const = default;

  [[nodiscard]] int count() const noexcept { return static_cast<int>(members_.size()); }
  /// Nodes are numbered from 0 in the order of their first members.
  [[nodiscard]] int node_of(int member) const { return node_of_[static_cast<std::size_t>(member)]; }
  /// In ascending order.
  [[nodiscard]] const std::vector<int>& members(int node) const {
    return members_[static_cast<std::size_t>(node)];
  }
  /// The turn of a message between two nodes, among the messages that a member sends, or receives,
  /// in one exchange. In each turn, the members of a node send to different members of one other
  /// node, so no message waits for another. 0 inside a node, or if nodes do not have equally many
  /// members: then the order of messages stays.
  [[nodiscard]] int turn(int from, int to) const;
  /// True if links are alike between `count` members, of which member(0) is the first: all are on
  /// one node, or each is on a node of its own.
  [[nodiscard]] bool are_linked_alike(int count, const std::function<int(int)>& member) const;

 private:
  std::vector<int> node_of_;               // by member
  std::vector<int> place_of_;              // in its node, by member
  bool even_ = true;                       // nodes have equally many members
  std::vector<std::vector<int>> members_;  // by node
};

}  // namespace annulus::ring
