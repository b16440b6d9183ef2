#pragma once

#include <cstdint>
#include <vector>

#include "schedules/building/group_nodes.hpp"
#include "schedules/building/kv_needs.hpp"

namespace annulus::ring {

/// Neighbouring columns of `origin` that `receiver` gets from `source`.
struct GatherMessage {
  int source = 0;
  int receiver = 0;
  int origin = 0;
  int step = 0;  ///< of GatherRoutes::steps()
  std::vector<ColumnPiece> pieces;
  std::int64_t token = 0;  ///< of the receive buffer, where they are put

  [[nodiscard]] GlobalPosition start() const { return pieces.front().positions.start; }
  [[nodiscard]] LocalRange columns() const;
};

/// The messages that bring every member of a group all columns that it needs.
///
/// If all links are alike, columns come straight from their owners, all in one step. Otherwise the
/// member of another node that needs most of an owner's columns gets them from the owner, and
/// passes them on to its node in the next step. Of several that need as much, it is the first one
/// from the place that the owner has in its own node, so that the members of a node share what
/// crosses to it. Nothing is sent to a member that does not need it, so a message that is not part
/// of another member's comes straight from the owner, even where the two overlap. In step t,
/// columns cross to the node that is t + 1 places after their owner's.
class GatherRoutes {
 public:
  /// The references must outlive the object.
  GatherRoutes(const KvNeeds& needs, const GroupNodes& nodes);

  /// The number of steps of a round.
  [[nodiscard]] int steps() const noexcept { return direct_ ? 1 : nodes_.count(); }
  /// The messages that a member gets, in order of position.
  [[nodiscard]] std::vector<GatherMessage> to(int receiver) const;
  /// The messages that a member sends, to its right neighbour first; to each receiver in order of
  /// position.
  [[nodiscard]] std::vector<GatherMessage> from(int sender) const;
  /// The messages that carry one member's columns to another, in local order.
  [[nodiscard]] std::vector<GatherMessage> between(int origin, int receiver) const;

 private:
  [[nodiscard]] LocalRange held(int member, int origin, const LocalRange& columns) const;
  [[nodiscard]] int entry(int node, int origin, const LocalRange& columns) const;
  [[nodiscard]] std::vector<int> passed_on(int member) const;

  const KvNeeds& needs_;
  const GroupNodes& nodes_;
  bool direct_;
};

}  // namespace annulus::ring
