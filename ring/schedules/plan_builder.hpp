#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include <annulus/ring/plan.hpp>

#include "schedules/block_finder.hpp"
#include "schedules/schedules.hpp"

namespace annulus::ring {

/// What every schedule needs to fill a RankPlan. A schedule says what is copied, exchanged and
/// computed in which step. The rest follows from that: where results lie, how they are reduced, and
/// the dependencies.
///
/// Within a step, copies come first, then exchanges, then blocks, so what a step receives is used
/// by blocks of a later step.
class PlanBuilder {
 public:
  /// The buffers of every plan: the caller's tensors. kLse is the sum of an unnormalised output. If
  /// the problem has them, bias, dense mask and maximum follow: see RankPlan::caller_buffer.
  static constexpr int kQuery = 0, kKey = 1, kValue = 2, kOutput = 3, kLse = 4;

  /// Starts a plan with these buffers and the group along the key/value sequence axes, group 0.
  explicit PlanBuilder(const RankContext& context);

  /// Index of a new buffer for keys and values of `tokens`, to send from or to receive into.
  int add_key_value(LocalRange tokens, HeadRange kv_heads, int reuses = -1);
  /// Likewise, holding copies of the rank's own `tokens`, for sending.
  int add_packed(LocalRange tokens, HeadRange kv_heads);
  /// Copies the rank's own `tokens` into a buffer for keys and values, from token `to` on.
  void pack(LocalRange tokens, int buffer, LocalPosition to);

  /// The rank's own columns, as they lie in the caller's tensors.
  [[nodiscard]] std::vector<PlacedPiece> own_columns() const;
  /// Computes all rows that see any of these columns, which lie in the buffers `key` and `value`
  /// without gaps between them, for the query heads that read `kv_heads`.
  void compute(int step, int key, int value, HeadRange kv_heads,
               const std::vector<PlacedPiece>& columns);
  void compute_own(int step, HeadRange kv_heads) {
    compute(step, kKey, kValue, kv_heads, own_columns());
  }
  /// The same for columns in one buffer that earlier exchanges fill from its end to its beginning.
  /// Prefers kernels that can await columns; these begin at once.
  void compute_awaiting(int step, int buffer, HeadRange kv_heads,
                        const std::vector<PlacedPiece>& columns);

  /// Adds one message to the exchange of a step.
  void send(int step, int peer, int origin, int buffer, LocalRange tokens);
  void receive(int step, int peer, int origin, int buffer, LocalRange tokens);

  /// Returns the complete plan.
  [[nodiscard]] RankPlan finish();

 private:
  void add_blocks(int step, int key, int value, std::vector<Block> blocks);
  [[nodiscard]] HeadRange query_heads(HeadRange kv_heads) const;
  [[nodiscard]] Exchange& exchange_of(int step);
  [[nodiscard]] Transfer transfer(int peer, int origin, int buffer, LocalRange tokens) const;

  const RankContext& context_;
  RankPlan plan_;
  BlockFinder finder_;
  std::map<int, std::size_t> exchanges_;  // index of the task, by step
};

/// Decides where the blocks of a plan put their results, and adds the buffers and reductions that
/// combine results into the caller's output and LSE. Tasks are in their final order.
///
/// A result that alone covers the output of its heads is written there directly if dtypes permit,
/// unless sinks or an unnormalised output ask for a reduction.
/// Otherwise partial results wait in buffers until the last block of a group of heads is done; then
/// they are reduced together and rounded once. If `input.options.result_bytes` cannot hold them
/// all, those so far are folded into one in float32.
void place_results(const PlanInput& input, RankPlan& plan);

/// Adds to every task what it waits for in other queues, derived from the buffers that tasks read
/// and write.
void add_dependencies(RankPlan& plan);

}  // namespace annulus::ring
