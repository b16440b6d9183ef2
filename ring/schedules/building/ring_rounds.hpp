#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "schedules/building/kv_needs.hpp"
#include "schedules/building/task_builder.hpp"

namespace annulus::ring {

/// The order in which a member gets the others' columns. In a plain ring (inner = members), member
/// m gets the columns of m − h in hop h. In a double ring, members form rows of `inner`: a round of
/// hops passes the columns of one row round another row, and between rounds they move on by a row.
/// In hop 0 a member has its own columns.
struct RingOrder {
  int members = 1;
  int inner = 1;  ///< divides `members`

  [[nodiscard]] int origin(int receiver, int hop) const;
  /// The inverse: the member that gets these columns.
  [[nodiscard]] int receiver(int origin, int hop) const;
  /// True if columns enter the receiver's row in this hop.
  [[nodiscard]] bool enters_row(int hop) const { return hop % inner == 0; }
};

/// True if columns come straight from their owners, for members on these ranks of the group. The
/// options must ask for it, and it must send no more bytes between nodes than from neighbour to
/// neighbour: the members of each row, and the members at one place of all rows, must be all on one
/// node or each on a node of its own.
[[nodiscard]] bool sends_directly(const RankContext& context, RingOrder order,
                                  const std::function<int(int member)>& group_rank);

/// One message of a hop: columns of `origin` that a receiver gets from `source`, which has held
/// them since hop `held_since` (0: its own), ending at token `token` of the receive buffer.
struct RingMessage {
  int source;
  int held_since;
  int origin;
  LocalRange columns;
  std::int64_t token;
};

/// The traffic of a ring. Members get the columns that they need straight from the owner or, in
/// some orders, from a member that has received at least as much. So nothing is sent to or through
/// a member that does not need it.
class RingTraffic {
 public:
  /// `direct`: within a row, columns come from the member that owns them or that got them from
  /// another row; between rows, from their owner. Otherwise they come from the neighbour.
  RingTraffic(const KvNeeds& needs, RingOrder order, bool direct)
      : needs_(needs), order_(order), direct_(direct) {}

  [[nodiscard]] const RingOrder& order() const noexcept { return order_; }
  /// The pieces that `receiver` gets in a hop, side by side from token 0 on.
  [[nodiscard]] std::vector<PlacedPiece> arrivals(int receiver, int hop) const;
  /// The messages of a hop. Pieces that are neighbours at their owner form one message from one
  /// source.
  [[nodiscard]] std::vector<RingMessage> messages(int receiver, int hop) const;
  /// True if messages of the hop may come from `sender`.
  [[nodiscard]] bool may_send(int sender, int receiver, int hop) const;
  /// The tokens in which a member keeps these columns after a hop.
  [[nodiscard]] LocalRange tokens_of(int member, int hop, LocalRange columns) const;

 private:
  // A member that may have an owner's columns, and the hop since which it has them.
  struct Holder {
    int member;
    int since;
  };

  [[nodiscard]] Holder holder_of(int receiver, int hop) const;
  [[nodiscard]] std::vector<LocalRange> runs_of(int receiver, int hop) const;
  [[nodiscard]] bool holds(int member, int hop, LocalRange columns) const;

  const KvNeeds& needs_;
  RingOrder order_;
  bool direct_;
};

/// A member's own columns of a group of heads, before they go round.
struct RingShare {
  HeadRange kv_heads;
  PlacedColumns columns;
  int sent_from = -1;  ///< an exchange buffer of these columns; −1: they have to be packed
};

/// Rounds of a ring, one for each group of heads.
class RingRounds {
 public:
  /// Plans the computation of a hop's columns, from this step on.
  using Compute = std::function<void(int step, int hop, const PlacedColumns& columns)>;

  /// `group_rank` maps a member to the plan's group. `most_kv_heads`: the most of any round.
  RingRounds(const RankContext& context, TaskBuilder& builder, const RingTraffic& traffic, int me,
             std::function<int(int member)> group_rank, std::int64_t most_kv_heads);

  /// The number of steps of a round.
  [[nodiscard]] int steps() const noexcept { return traffic_.order().members; }
  /// Adds a round, from this step on. Columns of hop h are computed in the h-th step after it.
  void add(int first_step, const RingShare& share, const Compute& compute);

 private:
  struct Departure {
    int receiver;
    RingMessage message;
  };

  // A part of a message, sent with the exchange of this step of the round.
  struct Part {
    int step;
    RingMessage message;
  };

  [[nodiscard]] std::vector<Part> parts_of(int hop, const RingMessage& message) const;
  [[nodiscard]] std::size_t slot_of(int hop) const;
  [[nodiscard]] int buffer_of(int hop) const { return receive_[slot_of(hop)]; }

  TaskBuilder& builder_;
  const RingTraffic& traffic_;
  int me_;
  std::function<int(int)> group_rank_;
  std::int64_t token_bytes_;  // of a key and a value, in the largest round
  // By hop, the same in every round:
  std::vector<std::vector<RingMessage>> incoming_;
  std::vector<std::vector<PlacedPiece>> arrivals_;
  std::vector<std::vector<Departure>> departures_;
  LocalRange sent_own_;
  bool at_once_ = false;              // every hop has a receive buffer of its own
  std::vector<std::int64_t> tokens_;  // by slot: the largest hop's
  std::vector<int> receive_;          // by slot: the buffer of the last round
};

}  // namespace annulus::ring
