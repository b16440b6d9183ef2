#pragma once

#include <cstddef>
#include <span>

#include "schedules/building/gathering.hpp"
#include "schedules/building/kv_needs.hpp"
#include "schedules/building/task_builder.hpp"
#include "schedules/schedules.hpp"

namespace annulus::ring {

/// The ranks of an exchange of heads, for both passes: `degree` neighbours along the sequence. If
/// there are more ranks, those with the same index among their neighbours form a ring.
class ExchangeOfHeads {
 protected:
  ExchangeOfHeads(const RankContext& context, int degree)
      : context_(context),
        degree_(degree),
        rings_(static_cast<int>(context.group.size()) / degree),
        me_(context.group_rank % degree),
        outer_(context.group_rank / degree),
        rows_(gathered(&HeldSequence::rows)),
        columns_(gathered(&HeldSequence::columns)),
        needs_(context.needs.of_neighbours(degree)) {}

  // Group ranks of a partner in the exchange, and of a member of the rank's ring.
  [[nodiscard]] int peer(int inner) const { return outer_ * degree_ + inner; }
  [[nodiscard]] int member(int ring) const { return ring * degree_ + me_; }

  // Sends a partner the rank's own tokens of a buffer, after they are copied into it.
  void send_own(TaskBuilder& builder, int step, int to, int buffer, const Gathering& gathering) {
    builder.copy_own(step, buffer);
    builder.send(step, peer(to), peer(me_), buffer, gathering.tokens(me_));
  }
  // Brings the tokens of a partner, or the rank's own, to their places in a buffer.
  void take(TaskBuilder& builder, int step, int from, int buffer, const Gathering& gathering) {
    if (from == me_) return builder.copy_own(step, buffer, gathering, me_);
    builder.receive(step, peer(from), peer(from), buffer, gathering.placed(from));
  }

  const RankContext& context_;
  int degree_;
  int rings_;  // ranks of a ring
  int me_;     // the rank's index among those that exchange heads …
  int outer_;  // … and in its ring
  Gathering rows_, columns_;
  const KvNeeds& needs_;  // of the ranks of the ring

 private:
  // The rows or columns that the rank holds together with its partners.
  [[nodiscard]] Gathering gathered(PositionRanges HeldSequence::*sequence) const {
    const auto count = static_cast<std::size_t>(degree_);
    const std::span<const int> all(context_.group);
    return gathering_of(context_, all.subspan(static_cast<std::size_t>(outer_) * count, count),
                        sequence);
  }
};

}  // namespace annulus::ring
