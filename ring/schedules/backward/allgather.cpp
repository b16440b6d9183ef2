#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "schedules/backward/backward_builder.hpp"
#include "schedules/building/gather_rounds.hpp"
#include "schedules/building/gathering.hpp"
#include "schedules/building/passed_rows.hpp"
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
      for (const GatherMessage& message : routes_.between(me_, from)) {
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
      builder_.add_columns(step, received, runs, builder_.own_columns_gradients());
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

// Bits that do not depend on the number of ranks need every sum in one place, in order of global
// position. So nothing is scattered: every rank gathers all columns for the gradients of its rows,
// and all rows, with dO, LSE and delta, for the gradients of its columns. Logits and dO Vᵀ
// are computed twice.
class AllgatherInOrder {
 public:
  explicit AllgatherInOrder(const RankContext& context)
      : builder_(context),
        groups_(gathered_heads(context, row_bytes_per_head())),
        rows_(gathering_of(context, context.group, &HeldSequence::rows)),
        columns_(gathering_of(context, context.group, &HeldSequence::columns)),
        operands_(PassedRows(builder_, true).gathered_scores(kFirstStep, rows_)) {}

  RankPlan plan() {
    int step = kFirstStep;
    for (const HeadRange& group : groups_) {
      const HeadRange heads = builder_.query_heads(group);
      Gathered& last = gathered_[static_cast<std::size_t>(step % 2)];
      last.key_value = builder_.add_key_value(columns_.all(), group, last.key_value);
      builder_.gather(step, last.key_value, columns_);
      const auto gather_rows = [&](Content content, int& buffer) {
        buffer = builder_.add_row_buffer(content, rows_.all(), heads, buffer);
        builder_.gather(step, buffer, rows_);
      };
      gather_rows(Content::query, last.query);
      gather_rows(Content::grad_output, last.grad_output);
      gather_rows(Content::lse, last.lse);
      gather_rows(Content::delta, last.delta);
      ++step;  // the next group is on its way while this one is computed
      builder_.compute(step, BackwardBuilder::kOwnRows, heads,
                       {last.key_value, last.key_value, columns_.pieces()}, {});
      operands_.query = last.query;
      const int all_rows =
          builder_.add_rows({operands_, last.grad_output, last.lse, last.delta}, rows_.positions());
      builder_.compute(step, all_rows, heads, builder_.own_columns(),
                       builder_.own_columns_gradients());
    }
    builder_.finish_rows(step + 1);
    builder_.finish_columns(step + 1);
    return builder_.finish();
  }

 private:
  static constexpr int kFirstStep = 1;  // after delta

  struct Gathered {
    int key_value = -1, query = -1, grad_output = -1, lse = -1, delta = -1;
  };

  // The rows of the query heads of a key/value head.
  [[nodiscard]] std::int64_t row_bytes_per_head() const {
    const AttentionProblem& problem = builder_.input().problem;
    const auto element = static_cast<std::int64_t>(size_of(problem.dtype));
    const auto sum = static_cast<std::int64_t>(size_of(builder_.gradient_dtype()));
    return builder_.plan().local.batch * problem.shape.query_length *
           problem.shape.heads_per_kv_head() *
           (element * (problem.shape.head_dim + problem.shape.value_dim) + 2 * sum);
  }

  BackwardBuilder builder_;
  std::vector<HeadRange> groups_;
  Gathering rows_, columns_;
  RowBuffers operands_;               // of all rows
  std::array<Gathered, 2> gathered_;  // the last buffers
};

}  // namespace

RankPlan plan_allgather_backward(const RankContext& context) {
  if (context.input.problem.in_global_order()) return AllgatherInOrder(context).plan();
  return AllgatherBackward(context).plan();
}

}  // namespace annulus::ring
