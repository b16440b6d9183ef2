#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include <annulus/core/error.hpp>

#include "schedules/backward/backward_builder.hpp"
#include "schedules/backward/ring_gradients.hpp"
#include "schedules/building/exchange_of_heads.hpp"
#include "schedules/building/head_shares.hpp"
#include "schedules/schedules.hpp"

// Ranks next to each other along the sequence exchange heads for sequence, as in the forward pass:
// each gets the rows and columns of all of them, for its share of the heads. Delta goes with the
// rows, so outputs need not. If there are more ranks than exchange heads, ranks with the same heads
// form a ring: see RingGradients. The gradients of a rank's heads are then complete, unless several
// ranks share a key/value head. Complete gradients are rounded before they are sent back; the
// others travel in float32, and the owner of the columns adds them in order of rank.
namespace annulus::ring {
namespace {

class HeadExchangeBackward : private ExchangeOfHeads {
 public:
  HeadExchangeBackward(const RankContext& context, int degree)
      : ExchangeOfHeads(context, degree),
        builder_(context),
        head_shares_(shared_heads(context.input.problem, builder_.plan().local, degree)),
        shares_(shares()) {
    if (builder_.has_row_replicas()) throw InternalError("ranks with the same rows exchange heads");
    contents_ = builder_.sent_with_rows();
    contents_.insert(contents_.end(), {Content::grad_output, Content::lse, Content::delta});
  }

  RankPlan plan() {
    gather();
    compute();
    scatter();
    if (!columns_complete()) builder_.finish_columns(scattered_in());
    builder_.finish_bias(scattered_in());
    return builder_.finish();
  }

 private:
  static constexpr int kGather = 1;  // after delta

  // Bits that do not depend on the number of ranks need the sums over a group of heads in one
  // place.
  [[nodiscard]] static std::vector<std::vector<HeadShare>> shared_heads(
      const AttentionProblem& problem, const AttentionShape& local, int degree) {
    return problem.in_global_order() ? share_whole_groups(local.heads, local.kv_heads, degree)
                                     : share_heads(local.heads, local.kv_heads, degree, 1);
  }
  // A ring begins when everything has arrived, since it passes it on.
  [[nodiscard]] int computed_from() const { return rings_ == 1 ? kGather : kGather + 1; }
  // The last step in which gradients are computed or added up in the ring.
  [[nodiscard]] int computed_until() const {
    return rings_ == 1 ? kGather : computed_from() + rings_;
  }
  [[nodiscard]] int scattered_in() const { return computed_until() + 1; }

  // By rank; no heads where there are fewer heads than ranks.
  [[nodiscard]] std::vector<HeadShare> shares() const {
    std::vector<HeadShare> result(head_shares_.size());
    for (std::size_t r = 0; r < result.size(); ++r) {
      if (head_shares_[r].empty()) continue;
      const HeadShare& first = head_shares_[r].front();
      const HeadShare& last = head_shares_[r].back();
      result[r] = {{first.heads.begin, last.heads.end() - first.heads.begin},
                   {first.kv_heads.begin, last.kv_heads.end() - first.kv_heads.begin}};
    }
    return result;
  }
  [[nodiscard]] const HeadShare& share_of(int rank) const {
    return shares_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] bool has_heads(int rank) const { return share_of(rank).heads.count > 0; }

  // True if no two ranks have gradients of the same key/value head.
  [[nodiscard]] bool columns_complete() const {
    if (builder_.has_column_replicas()) return false;
    std::int64_t heads = 0;
    for (const HeadShare& share : shares_) heads += share.kv_heads.count;
    return heads <= builder_.plan().local.kv_heads;
  }

  // True if gradients of columns travel in the dtype of the result.
  [[nodiscard]] bool columns_are_final() const {
    return columns_complete() && builder_.complete_dtype() == builder_.input().problem.dtype;
  }

  void gather() {
    for (int turn = 1; turn < degree_; ++turn) {
      const int to = (me_ + turn) % degree_;
      if (!has_heads(to)) continue;
      const HeadShare& share = share_of(to);
      const LocalRange rows = builder_.all_rows();
      for (const Content content : contents_) {
        if (rows.count == 0) break;
        const int packed = builder_.add_row_buffer(content, rows, share.heads);
        send_own(builder_, kGather, to, packed, rows_);
      }
      if (const LocalRange columns = builder_.all_columns(); columns.count > 0) {
        const int packed = builder_.add_key_value(columns, share.kv_heads);
        send_own(builder_, kGather, to, packed, columns_);
      }
    }
    if (!has_heads(me_)) return;
    for (const Content content : contents_) {
      buffers_[content] = builder_.add_row_buffer(content, rows_.all(), share_of(me_).heads);
    }
    key_value_ = builder_.add_key_value(columns_.all(), share_of(me_).kv_heads);
    for (int turn = 0; turn < degree_; ++turn) {
      const int from = (me_ + degree_ - turn) % degree_;
      for (const Content content : contents_) {
        take(builder_, kGather, from, buffers_[content], rows_);
      }
      take(builder_, kGather, from, key_value_, columns_);
    }
  }

  void compute() {
    if (!has_heads(me_)) return;
    const HeadShare& share = share_of(me_);
    const auto buffer = [&](Content content) {
      const auto found = buffers_.find(content);
      return found == buffers_.end() ? builder_.own(content) : found->second;
    };
    grad_query_ = builder_.add_exchange({Content::grad_query}, builder_.gradient_dtype(),
                                        rows_.all(), share.heads);
    const ColumnGradients columns = builder_.add_column_gradients(columns_.all(), share.kv_heads);
    grad_columns_ = columns.key;
    if (builder_.bias_moves()) {
      grad_bias_ = builder_.add_row_buffer(Content::grad_bias, rows_.all(), share.heads);
    }
    const int rows = builder_.add_rows(
        {{buffer(Content::query), buffer(Content::bias), buffer(Content::dense_mask)},
         buffer(Content::grad_output),
         buffer(Content::lse),
         buffer(Content::delta),
         grad_query_,
         builder_.bias_moves() ? grad_bias_ : builder_.own_backward_rows().grad_bias},
        rows_.positions());
    const auto add = [&](int step, const PlacedColumns& placed, const ColumnGradients& gradients) {
      for (const HeadShare& part : head_shares_[static_cast<std::size_t>(me_)]) {
        builder_.compute(step, rows, part.heads, placed, gradients);
      }
    };
    const PlacedColumns held{key_value_, key_value_, columns_.pieces()};
    if (rings_ == 1) {
      add(computed_from(), held, columns);
    } else {
      RingGradients ring(
          context_, builder_, needs_, {rings_, rings_}, outer_,
          [this](int of) { return member(of); }, share.kv_heads);
      ring.add(computed_from(), {share.kv_heads, held, key_value_}, columns, add);
    }
    grad_query_ = rounded(grad_query_);
    if (columns_are_final()) {
      grad_columns_ = sent_columns_ = rounded(grad_columns_);
    } else {
      sent_columns_ = builder_.for_wire(computed_until(), grad_columns_);
    }
  }

  // Complete gradients in the dtype in which they are sent.
  int rounded(int buffer) {
    const Buffer held = builder_.plan().buffer(buffer);
    if (builder_.complete_dtype() == held.dtype) return buffer;
    const int result =
        builder_.add_exchange(held.contents, builder_.complete_dtype(), held.tokens, held.heads);
    builder_.sum(computed_until(), {builder_.whole(buffer)}, builder_.whole(result));
    return result;
  }

  void scatter() {
    for (int turn = 1; turn < degree_ && has_heads(me_); ++turn) {
      const int to = (me_ + turn) % degree_;
      for (const auto& [buffer, gathering] :
           {std::pair(grad_query_, &rows_), std::pair(grad_bias_, &rows_),
            std::pair(sent_columns_, &columns_)}) {
        if (buffer < 0) continue;
        builder_.send(scattered_in(), peer(to), peer(to), buffer, gathering->placed(to));
      }
    }
    for (int from = 0; from < degree_; ++from) {
      if (!has_heads(from)) continue;
      take_rows(from);
      take_columns(from);
    }
  }

  // The buffer of the gradients that `from` has computed: the rank's own, or received.
  int taken(int from, const std::vector<Content>& contents, DType dtype, LocalRange own,
            HeadRange heads, const Gathering& gathering) {
    const int received = builder_.add_exchange(contents, dtype, own, heads);
    builder_.receive(scattered_in(), peer(from), peer(me_), received, gathering.tokens(me_));
    return received;
  }
  template <class Use>
  void each_run(int from, const Gathering& gathering, const Use& use) {
    for (const Gathering::Message& message : gathering.messages(me_)) {
      use(from == me_ ? message.placed() : message.tokens, message.tokens);
    }
  }

  void take_rows(int from) {
    const LocalRange own = builder_.all_rows();
    if (own.count == 0) return;
    const int buffer = from == me_ ? grad_query_
                                   : taken(from, {Content::grad_query}, builder_.complete_dtype(),
                                           own, share_of(from).heads, rows_);
    each_run(from, rows_, [&](LocalRange tokens, LocalRange own_tokens) {
      builder_.put(scattered_in(), Content::grad_query, builder_.whole(buffer).at(tokens),
                   own_tokens);
    });
    if (builder_.bias_moves()) take_bias(from);
  }

  // Takes a rank's gradients of the bias; the parts of all heads are summed if they share the bias.
  void take_bias(int from) {
    const HeadRange heads = builder_.heads_of(Content::grad_bias, share_of(from).heads);
    const int buffer = from == me_
                           ? grad_bias_
                           : taken(from, {Content::grad_bias},
                                   builder_.plan().buffer(builder_.own(Content::grad_bias)).dtype,
                                   builder_.all_rows(), heads, rows_);
    each_run(from, rows_, [&](LocalRange tokens, LocalRange own_tokens) {
      builder_.add_to_own_bias(scattered_in(), builder_.whole(buffer).at(tokens), own_tokens);
    });
  }

  void take_columns(int from) {
    const LocalRange own = builder_.all_columns();
    if (own.count == 0) return;
    const std::vector<Content> contents{Content::grad_key, Content::grad_value};
    const DType dtype = columns_are_final() ? builder_.complete_dtype() : builder_.wire_dtype();
    const int buffer = from == me_
                           ? grad_columns_
                           : taken(from, contents, dtype, own, share_of(from).kv_heads, columns_);
    each_run(from, columns_, [&](LocalRange tokens, LocalRange own_tokens) {
      const Region part = builder_.whole(buffer).at(tokens);
      if (!columns_complete()) {
        return builder_.add_columns(scattered_in(), part, own_tokens,
                                    builder_.own_columns_gradients());
      }
      for (const Content content : contents) {
        builder_.put(scattered_in(), content, part, own_tokens);
      }
    });
  }

  BackwardBuilder builder_;
  std::vector<std::vector<HeadShare>>
      head_shares_;                 // by rank: whole groups of heads, or parts of one
  std::vector<HeadShare> shares_;   // by rank: all its heads
  std::vector<Content> contents_;   // sent with rows
  std::map<Content, int> buffers_;  // of all rows, for the rank's heads
  int key_value_ = -1;              // of all columns
  int grad_query_ = -1, grad_columns_ = -1;
  int sent_columns_ = -1;  // grad_columns_ in the dtype that is sent
  int grad_bias_ = -1;     // of all rows, if it has rows
};

}  // namespace

RankPlan plan_ulysses_backward(const RankContext& context) {
  return HeadExchangeBackward(context, static_cast<int>(context.group.size())).plan();
}

RankPlan plan_hybrid_backward(const RankContext& context) {
  const int degree = ulysses_degree(context.input);
  if (degree == 1) return plan_ring_backward(context);  // no heads to exchange
  return HeadExchangeBackward(context, degree).plan();
}

}  // namespace annulus::ring
