#pragma once

#include <cstddef>
#include <cstdint>
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
  [[nodiscard]] std::vector<PlacedPiece> pieces() const;
  /// The messages of a member, in order of its tokens.
  [[nodiscard]] const std::vector<Message>& messages(int member) const {
    return messages_[static_cast<std::size_t>(member)];
  }

 private:
  std::vector<std::vector<Message>> messages_;  // by member
  PositionRanges positions_;
};

}  // namespace annulus::ring
