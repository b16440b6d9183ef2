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

// Bits that do not depend on the number of ranks need every sum in one place, in order of global
// position. So nothing is scattered: every rank gathers all columns for the gradients of its rows,
// and all rows, with dO, LSE and delta, for the gradients of its columns. Logits and dO Vᵀ
// are computed twice.
class AllgatherInOrder {
 public:
  explicit AllgatherInOrder(const RankContext& context)
      : me_(context.group_rank),
        ranks_(static_cast<int>(context.group.size())),
        builder_(context),
        scores_(builder_, true),
        groups_(gathered_heads(context, row_bytes_per_head())),
        rows_(gathering_of(context, context.group, &HeldSequence::rows)),
        columns_(gathering_of(context, context.group, &HeldSequence::columns)),
        operands_(scores_.for_all()) {}

  RankPlan plan() {
    gather_scores();
    int step = kFirstStep;
    for (const HeadRange& group : groups_) {
      const HeadRange heads = builder_.query_heads(group);
      Gathered& last = gathered_[static_cast<std::size_t>(step % 2)];
      last.key_value = gather(step, {Content::key, Content::value},
                              {builder_.own(Content::key), builder_.own(Content::value)}, group,
                              columns_, last.key_value);
      const BackwardRows& own = builder_.own_backward_rows();
      const auto rows = [&](Content content, int from, int reuses) {
        return gather(step, {content}, {from}, heads, rows_, reuses);
      };
      last.query = rows(Content::query, own.operands.query, last.query);
      last.grad_output = rows(Content::grad_output, own.grad_output, last.grad_output);
      last.lse = rows(Content::lse, own.lse, last.lse);
      last.delta = rows(Content::delta, own.delta, last.delta);
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

  // Adds an exchange in which all ranks of the group get the tokens of all, and returns their
  // buffer; the rank's own are copied from these buffers, one for each content.
  int gather(int step, const std::vector<Content>& contents, const std::vector<int>& from,
             HeadRange heads, const Gathering& gathering, int reuses) {
    const DType dtype = builder_.plan().buffer(from.front()).dtype;
    const int buffer = builder_.add_exchange(contents, dtype, gathering.all(), heads, reuses);
    for (const Gathering::Message& message : gathering.messages(me_)) {
      for (std::size_t i = 0; i < contents.size(); ++i) {
        builder_.copy(step, contents[i], from[i], message.tokens.begin, buffer, message.placed(),
                      heads);
      }
    }
    each_other([&](int to, int source) {
      builder_.send(step, to, me_, buffer, gathering.placed(me_));
      builder_.receive(step, source, source, buffer, gathering.placed(source));
    });
    return buffer;
  }

  // A rank gets the part of its own columns where a bias or a dense mask differs by rows.
  void gather_scores() {
    for (const Content content : scores_.contents()) {
      if (content == Content::query) continue;
      const int buffer = scores_.add_of_others(content, rows_.all());
      operands_[content] = buffer;
      for (const Gathering::Message& message : rows_.messages(me_)) {
        builder_.copy_own(kFirstStep, content, message.tokens.begin, buffer, message.placed());
      }
      each_other([&](int to, int source) {
        const int packed = scores_.pack(kFirstStep, content, to);
        builder_.send(kFirstStep, to, me_, packed, rows_.tokens(me_));
        builder_.receive(kFirstStep, source, source, buffer, rows_.placed(source));
      });
    }
  }

  // The ranks to send to and to receive from, one turn after the other.
  template <class Turn>
  void each_other(const Turn& take) const {
    for (int turn = 1; turn < ranks_; ++turn) {
      take((me_ + turn) % ranks_, (me_ + ranks_ - turn) % ranks_);
    }
  }

  int me_;
  int ranks_;
  BackwardBuilder builder_;
  PassedRows scores_;
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
