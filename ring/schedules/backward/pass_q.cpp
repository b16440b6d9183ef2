#include <array>
#include <cstddef>
#include <set>

#include "schedules/backward/backward_builder.hpp"
#include "schedules/building/passed_rows.hpp"
#include "schedules/schedules.hpp"

// Keys, values and their gradients stay where they are. Rows go round with dO, LSE and delta. The
// gradients of the rows go straight back in float32, and their owner adds them in the order of the
// hops.
namespace annulus::ring {
namespace {

class PassQBackward {
 public:
  explicit PassQBackward(const RankContext& context)
      : context_(context),
        ranks_(static_cast<int>(context.group.size())),
        me_(context.group_rank),
        builder_(context),
        passed_(builder_, !context.input.backward->grad_bias),
        heads_{0, builder_.plan().local.heads},
        rows_(builder_.all_rows()) {}

  RankPlan plan() {
    const Rows common{passed_.for_all()};
    arrived_ = {common, common};
    builder_.compute(1, BackwardBuilder::kOwnRows, heads_, builder_.own_columns(),
                     builder_.own_columns_gradients());
    for (int hop = 1; hop < ranks_; ++hop) {
      const int to = (me_ + hop) % ranks_;
      const int from = (me_ + ranks_ - hop) % ranks_;
      if (context_.needs.sees(me_, to)) {
        send_rows(hop, to);
        take_gradients(hop, to);
      }
      if (context_.needs.sees(from, me_)) compute_hop(hop, from);
    }
    builder_.finish_rows(added_in(ranks_ - 1));
    builder_.finish_columns(added_in(ranks_ - 1));
    return builder_.finish();
  }

 private:
  static constexpr int kGradientTurn = 1;  // after rows

  // The step in which a hop's rows are sent. Delta is computed in step 0.
  [[nodiscard]] static int sent_in(int hop) { return hop; }
  [[nodiscard]] static int computed_in(int hop) { return hop + 1; }
  [[nodiscard]] static int added_in(int hop) { return hop + 2; }

  // Buffers of rows to be sent or received; contents of one dtype share a buffer.
  struct Rows {
    RowBuffers operands;
    int lse = -1, delta = -1;
    [[nodiscard]] std::set<int> statistics() const { return {lse, delta}; }
  };
  // Gradients of rows, and of a bias if it has rows.
  struct RowGradients {
    int query = -1, bias = -1;
  };

  [[nodiscard]] DType own_dtype(Content content) const {
    return builder_.plan().buffer(builder_.own(content)).dtype;
  }

  // Adds buffers for queries with dO, and for LSE with delta, in the memory of `last`.
  void add(LocalRange rows, Rows& last) {
    last.operands.query =
        builder_.add_exchange({Content::query, Content::grad_output},
                              own_dtype(Content::grad_output), rows, heads_, last.operands.query);
    const DType lse = own_dtype(Content::lse);
    if (lse == own_dtype(Content::delta)) {
      last.lse = last.delta =
          builder_.add_exchange({Content::lse, Content::delta}, lse, rows, heads_, last.lse);
      return;
    }
    last.lse = builder_.add_row_buffer(Content::lse, rows, heads_, last.lse);
    last.delta = builder_.add_row_buffer(Content::delta, rows, heads_, last.delta);
  }

  // Rows that all ranks get are copied once. Of a bias or a mask, every rank may get another part.
  void send_rows(int hop, int to) {
    const int step = sent_in(hop);
    if (queries_.operands.query < 0) {
      add(rows_, queries_);
      builder_.copy_own(step, queries_.operands.query);
      for (const int buffer : queries_.statistics()) builder_.copy_own(step, buffer);
    }
    builder_.send(step, to, me_, queries_.operands.query, rows_);
    for (const int buffer : queries_.statistics()) builder_.send(step, to, me_, buffer, rows_);
    Rows& packed = packed_[turn(hop)];
    for (const Content content : passed_.contents()) {
      if (content == Content::query) continue;
      int& buffer = packed.operands[content];
      buffer = passed_.pack(step, content, to, buffer);
      builder_.send(step, to, me_, buffer, rows_);
    }
  }

  void receive_rows(int hop, int from, LocalRange rows, Rows& arrived) {
    const int step = sent_in(hop);
    add(rows, arrived);
    builder_.receive(step, from, from, arrived.operands.query, rows);
    for (const int buffer : arrived.statistics()) builder_.receive(step, from, from, buffer, rows);
    for (const Content content : passed_.contents()) {
      if (content == Content::query) continue;
      int& buffer = arrived.operands[content];
      buffer = passed_.add_of_others(content, rows, buffer);
      builder_.receive(step, from, from, buffer, rows);
    }
  }

  void compute_hop(int hop, int from) {
    const int rank = context_.group[static_cast<std::size_t>(from)];
    const PositionRanges theirs = context_.input.operands.query.positions(rank, 1);
    const LocalRange rows{LocalPosition(0), theirs.size()};
    Rows& arrived = arrived_[turn(hop)];
    receive_rows(hop, from, rows, arrived);
    RowGradients& computed = computed_[turn(hop)];
    add_gradients(rows, computed);
    const int index = builder_.add_rows(
        {arrived.operands, arrived.operands.query, arrived.lse, arrived.delta, computed.query,
         builder_.bias_moves() ? computed.bias : builder_.own_backward_rows().grad_bias},
        theirs);
    builder_.compute(computed_in(hop), index, heads_, builder_.own_columns(),
                     builder_.own_columns_gradients());
    for (const int buffer : {computed.query, computed.bias}) {
      if (buffer >= 0) builder_.send({added_in(hop), kGradientTurn}, from, from, buffer, rows);
    }
  }

  void take_gradients(int hop, int to) {
    RowGradients& received = received_[turn(hop)];
    add_gradients(rows_, received);
    const int step = added_in(hop);
    for (const int buffer : {received.query, received.bias}) {
      if (buffer >= 0) builder_.receive({step, kGradientTurn}, to, me_, buffer, rows_);
    }
    const Region into = builder_.whole(builder_.own_backward_rows().grad_query);
    builder_.sum(step, {into, builder_.whole(received.query)}, into);
    if (builder_.bias_moves()) builder_.add_to_own_bias(step, builder_.whole(received.bias), rows_);
  }

  void add_gradients(LocalRange rows, RowGradients& last) {
    last.query = builder_.add_exchange({Content::grad_query}, builder_.gradient_dtype(), rows,
                                       heads_, last.query);
    if (!builder_.bias_moves()) return;
    last.bias = builder_.add_row_buffer(Content::grad_bias, rows, heads_, last.bias);
  }

  // Hops use two sets of buffers in turn.
  [[nodiscard]] static std::size_t turn(int hop) { return static_cast<std::size_t>(hop % 2); }

  const RankContext& context_;
  int ranks_;
  int me_;
  BackwardBuilder builder_;
  PassedRows passed_;
  HeadRange heads_;
  LocalRange rows_;
  Rows queries_;                                     // the rank's own, for all others
  std::array<Rows, 2> packed_, arrived_;             // the last ones
  std::array<RowGradients, 2> computed_, received_;  // likewise
};

}  // namespace

RankPlan plan_pass_q_backward(const RankContext& context) {
  return PassQBackward(context).plan();
}

}  // namespace annulus::ring
