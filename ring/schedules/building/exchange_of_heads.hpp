#pragma once

#include <cstddef>
#include <span>

#include "schedules/building/gathering.hpp"
#include "schedules/building/kv_needs.hpp"
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
        rows_(gathered(outer_, &HeldSequence::rows)),
        columns_(gathered(outer_, &HeldSequence::columns)),
        needs_(context.input.problem, rings_, [this](int ring) {
          HeldSequence held = held_by(context_.input.operands, context_.rank);
          held.rows = gathered(ring, &HeldSequence::rows).positions();
          held.columns = gathered(ring, &HeldSequence::columns).positions();
          return held;
        }) {}

  // Group ranks of a partner in the exchange, and of a member of the rank's ring.
  [[nodiscard]] int peer(int inner) const { return outer_ * degree_ + inner; }
  [[nodiscard]] int member(int ring) const { return ring * degree_ + me_; }

  const RankContext& context_;
  int degree_;
  int rings_;  // ranks of a ring
  int me_;     // the rank's index among those that exchange heads …
  int outer_;  // … and in its ring
  Gathering rows_, columns_;
  KvNeeds needs_;  // of the ranks of the ring

 private:
  // The rows or columns that the ranks at a ring position hold together.
  [[nodiscard]] Gathering gathered(int ring, PositionRanges HeldSequence::*sequence) const {
    const auto count = static_cast<std::size_t>(degree_);
    const std::span<const int> all(context_.group);
    return gathering_of(context_, all.subspan(static_cast<std::size_t>(ring) * count, count),
                        sequence);
  }
};

}  // namespace annulus::ring
