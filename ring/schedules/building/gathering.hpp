#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <annulus/core/position.hpp>

#include "schedules/building/block_finder.hpp"

namespace annulus::ring {

/// The shards of several ranks, brought together in one buffer: in order of global position if that
/// takes few messages, else rank by rank.
class Gathering {
 public:
  /// Tokens that are contiguous both in one shard and in the buffer.
  struct Message {
    LocalRange tokens;    ///< of the shard
    std::int64_t at = 0;  ///< token of the buffer
    [[nodiscard]] LocalRange placed() const { return {LocalPosition(at), tokens.count}; }
  };

  explicit Gathering(const std::vector<PositionRanges>& shards);

  [[nodiscard]] std::int64_t size() const noexcept { return positions_.size(); }
  /// The positions of the buffer's tokens.
  [[nodiscard]] const PositionRanges& positions() const noexcept { return positions_; }
  /// The same as columns.
  [[nodiscard]] std::vector<PlacedPiece> pieces() const { return side_by_side(positions_); }
  /// All tokens of the buffer.
  [[nodiscard]] LocalRange all() const { return {LocalPosition(0), size()}; }
  /// The messages of a member, in order of its tokens.
  [[nodiscard]] const std::vector<Message>& messages(int member) const {
    return messages_[static_cast<std::size_t>(member)];
  }
  /// Their tokens in the member's shard, and in the buffer.
  [[nodiscard]] std::vector<LocalRange> tokens(int member) const;
  [[nodiscard]] std::vector<LocalRange> placed(int member) const;

 private:
  std::vector<std::vector<Message>> messages_;  // by member
  PositionRanges positions_;
};

/// The rows, or the columns, that these ranks of the mesh hold together.
[[nodiscard]] Gathering gathering_of(const RankContext& context, std::span<const int> ranks,
                                     PositionRanges HeldSequence::*sequence);

}  // namespace annulus::ring
