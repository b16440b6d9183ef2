#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "schedules/backward/backward_builder.hpp"
#include "schedules/gather_rounds.hpp"
#include "schedules/schedules.hpp"

// Keys and values are gathered as in the forward pass, one group of heads after another. The
// gradients of a group are scattered while the next one is computed: every rank sends its parts,
// float32 or rounded, to the owners of the columns, who add them in the order in which they arrive.
namespace annulus::ring {
namespace {

constexpr int kGradientTurn = 1;  // after keys and values

class AllgatherBackward {
 public:
  explicit AllgatherBackward(const RankContext& context)
      : needs_(context.needs),
        me_(context.group_rank),
        groups_(gathered_heads(context)),
        routes_(context.needs, context.nodes),
        builder_(context),
        rounds_(builder_, routes_, me_) {}

  RankPlan plan() {
    int step = 0;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (g > 0) step = finish(g - 1);
      builder_.compute(step, BackwardBuilder::kOwnRows, builder_.query_heads(groups_[g]),
                       builder_.own_columns(), builder_.own_columns_gradients());
      rounds_.add(g, groups_[g]);
    }
    if (!groups_.empty()) step = finish(groups_.size() - 1);
    builder_.finish_rows(step + 1);
    builder_.finish_columns(step + 1);
    return builder_.finish();
  }

 private:
  // Computes the arrivals of a group of heads and scatters their gradients. Returns the step.
  int finish(std::size_t g) {
    const int step = rounds_.arrived_in(g);
    if (rounds_.tokens() > 0) {
      int& parts = parts_[g % parts_.size()];
      parts = builder_.add_column_gradients({LocalPosition(0), rounds_.tokens()}, groups_[g], parts)
                  .key;
      builder_.compute(step, BackwardBuilder::kOwnRows, builder_.query_heads(groups_[g]),
                       rounds_.gathered(g), {parts, parts});
      int& last = sent_[g % sent_.size()];
      const int sent = builder_.for_wire(step, parts, last);
      if (sent != parts) last = sent;
      for (const GatherMessage& arrival : rounds_.by_origin()) {
        builder_.send({step + 1, kGradientTurn}, arrival.origin, arrival.origin, sent,
                      placed(arrival));
      }
    }
    take(g, step + 1);
    return step;
  }

  // Takes the parts for the rank's own columns, from its right neighbour first.
  void take(std::size_t g, int step) {
    const int ranks = needs_.size();
    for (int turn = 1; turn < ranks; ++turn) {
      const int from = (me_ + turn) % ranks;
      std::vector<LocalRange> runs;
      std::int64_t tokens = 0;
      for (const GatherMessage& message : by_origin(routes_.to(from))) {
        if (message.origin != me_) continue;
        runs.push_back(message.columns());
        tokens += message.columns().count;
      }
      if (tokens == 0) continue;
      int& received = received_[{from, g % 2}];
      if (g < 2) received = -1;
      received = builder_.add_wire_gradients({LocalPosition(0), tokens}, groups_[g], received);
      LocalPosition token(0);
      for (const LocalRange& run : runs) {
        builder_.receive({step, kGradientTurn}, from, me_, received, {token, run.count});
        token = token + run.count;
      }
      builder_.add_to_own_columns(step, received, runs);
    }
  }

  const KvNeeds& needs_;
  int me_;
  std::vector<HeadRange> groups_;
  GatherRoutes routes_;
  BackwardBuilder builder_;
  GatherRounds rounds_;
  std::array<int, 2> parts_{-1, -1}, sent_{-1, -1};      // the last buffers
  std::map<std::pair<int, std::size_t>, int> received_;  // likewise, by rank
};

}  // namespace

RankPlan plan_allgather_backward(const RankContext& context) {
  if (context.group.size() == 1 || has_replicated_rows(context.input)) {
    return plan_local_backward(context);
  }
  return AllgatherBackward(context).plan();
}

}  // namespace annulus::ring
