#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedules/building/gather_routes.hpp"
#include "schedules/building/task_builder.hpp"

namespace annulus::ring {

/// Bytes of one head of a token's key and value, for all batches of the rank.
[[nodiscard]] std::int64_t token_bytes_per_head(const RankContext& context);
/// The groups of key/value heads that are gathered one after another, to bound memory: the same on
/// all ranks of a group. `more_bytes`: what is gathered of a head beside its keys and values, the
/// same on all ranks of a group, too.
[[nodiscard]] std::vector<HeadRange> gathered_heads(const RankContext& context,
                                                    std::int64_t more_bytes = 0);

/// The turn in which a receiver takes messages of `source`; 1 is its left neighbour's. Turns keep
/// all ranks from reading from one at once.
[[nodiscard]] int turn_of(int source, int receiver, int ranks);
/// Arrivals in order of their turns. Arrivals from one rank keep their order, so that messages
/// between two ranks match.
[[nodiscard]] std::vector<GatherMessage> by_turn(std::vector<GatherMessage> arrivals, int me,
                                                 int ranks);
/// Arrivals in order of their origin and its columns.
[[nodiscard]] std::vector<GatherMessage> by_origin(std::vector<GatherMessage> arrivals);
/// Puts arrivals side by side into a buffer. Returns the number of its tokens.
std::int64_t place(std::vector<GatherMessage>& arrivals);
[[nodiscard]] std::vector<PlacedPiece> placed_pieces(const std::vector<GatherMessage>& arrivals);
/// The tokens of an arrival in the buffer.
[[nodiscard]] LocalRange placed(const GatherMessage& arrival);

/// Gathers the columns that a rank needs from others, for one group of key/value heads after
/// another.
class GatherRounds {
 public:
  /// `me`: the rank in the group. The references must outlive the object.
  GatherRounds(TaskBuilder& builder, const GatherRoutes& routes, int me);

  /// The messages that arrive in a round, in order of origin and columns.
  [[nodiscard]] const std::vector<GatherMessage>& by_origin() const noexcept { return by_origin_; }
  /// Tokens of a round.
  [[nodiscard]] std::int64_t tokens() const noexcept { return tokens_; }
  /// The step from which on the columns of round `g` can be computed.
  [[nodiscard]] int arrived_in(std::size_t g) const { return first_step(g) + last_ + 1; }
  /// Adds the messages of round `g`, one round after another.
  void add(std::size_t g, HeadRange kv_heads);
  /// The columns of round `g`, which must be one of the last rounds.
  [[nodiscard]] PlacedColumns gathered(std::size_t g) const;

 private:
  [[nodiscard]] int first_step(std::size_t g) const;
  [[nodiscard]] LocalRange passed_on(const GatherMessage& sent) const;

  TaskBuilder& builder_;
  int me_;
  std::vector<GatherMessage> by_origin_;  // arrivals, in order of origin and columns
  std::vector<GatherMessage> arrivals_, departures_;
  std::int64_t tokens_ = 0;
  std::vector<PlacedPiece> pieces_;
  LocalRange sent_own_;
  int last_;
  std::vector<int> receive_;  // buffers
};

}  // namespace annulus::ring
