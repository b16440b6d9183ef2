#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include <annulus/ring/plan.hpp>

#include "schedules/building/block_finder.hpp"
#include "schedules/building/gathering.hpp"
#include "schedules/schedules.hpp"

namespace annulus::ring {

/// Columns in the buffers `key` and `value`, without gaps between them.
struct PlacedColumns {
  int key = 0;
  int value = 0;
  std::vector<PlacedPiece> pieces;
};

/// Buffers of rows and of what is sent with them; −1 for a bias or a mask that the problem lacks.
struct RowBuffers {
  int query = -1, bias = -1, dense_mask = -1;
  [[nodiscard]] int& operator[](Content content) {
    return content == Content::query ? query : content == Content::bias ? bias : dense_mask;
  }
};

/// An exchange of a group in a step. A step may have several exchanges, of several groups or one
/// after the other; the slot is the same on all ranks that take part in one.
struct Slot {
  // NOLINTNEXTLINE(google-explicit-constructor): most exchanges are the only one of their step.
  Slot(int of_step, int of_turn = 0, int of_group = 0)
      : step(of_step), turn(of_turn), group(of_group) {}
  int step;
  int turn;
  int group;
  auto operator<=>(const Slot&) const = default;
};

/// Builds the buffers, copies and exchanges of a RankPlan, for both passes.
///
/// Within a step, copies come first, then exchanges in order of their slots, then everything else
/// in the order in which it was added. So blocks of the same step or later use what a step
/// receives. As slots are the same on all ranks, all ranks have one order of exchanges over all
/// groups. In an exchange, messages between nodes are in the order of GroupNodes::turn().
class TaskBuilder {
 public:
  /// The plan so far: sizes and buffers.
  [[nodiscard]] const RankPlan& plan() const noexcept { return plan_; }
  [[nodiscard]] const PlanInput& input() const noexcept { return context_.input; }
  [[nodiscard]] const RankContext& context() const noexcept { return context_; }
  [[nodiscard]] BatchRange batches() const noexcept { return {0, plan_.local.batch}; }
  /// All tokens of the rank's queries, and of its keys.
  [[nodiscard]] LocalRange all_rows() const { return {LocalPosition(0), plan_.local.query_length}; }
  [[nodiscard]] LocalRange all_columns() const { return {LocalPosition(0), plan_.local.kv_length}; }
  /// The rank's own tensor of this content: the caller's, or the delta of a backward pass; −1 if
  /// there is none.
  [[nodiscard]] int own(Content content) const {
    return content == Content::delta ? delta_ : plan_.caller_buffer(content);
  }
  /// All of a buffer.
  [[nodiscard]] Region whole(int buffer) const { return plan_.whole(buffer); }

  /// Index of the group of ranks that differ from this one only along `axes`. Group 0 lies along
  /// the key/value sequence. All ranks must add the same groups in the same order.
  int add_group(const AxisNames& axes);

  /// Index of a new buffer of `tokens`, to send from or to receive into.
  int add_exchange(std::vector<Content> contents, DType dtype, LocalRange tokens, HeadRange heads,
                   int reuses = -1);
  /// The same for keys and values.
  int add_key_value(LocalRange tokens, HeadRange kv_heads, int reuses = -1);
  /// The same, filled with copies of the rank's own `tokens`, for sending.
  int add_packed(LocalRange tokens, HeadRange kv_heads);
  /// Index of a new buffer that is not exchanged.
  int add_local(Content content, DType dtype, LocalRange tokens, HeadRange heads, int reuses = -1);
  /// The contents of rows that are sent: queries, and a bias and a mask whose rows differ.
  [[nodiscard]] std::vector<Content> sent_with_rows() const;
  /// The heads of such a content that query heads read: the same heads, or the only one of a bias
  /// or a mask.
  [[nodiscard]] HeadRange heads_of(Content content, HeadRange heads) const;
  /// Index of a new exchange buffer of such a content, for rows and query heads; for `columns` if
  /// it is a bias or a mask.
  int add_row_buffer(Content content, LocalRange rows, HeadRange heads, int reuses = -1,
                     std::optional<PositionRanges> columns = {});
  /// Copies the rank's own tokens, from `begin` on, to `tokens` of an exchange buffer: all contents
  /// and heads of the buffer.
  void copy_own(int step, int buffer, LocalPosition begin, LocalRange tokens);
  /// The same for all tokens of the buffer.
  void copy_own(int step, int buffer);
  /// The same for the tokens of the rank, a member of a gathering. The buffer gathers all members'.
  void copy_own(int step, int buffer, const Gathering& gathering, int member);
  /// Fills a buffer with the tokens of all members of group 0: copies the rank's own tokens, and
  /// exchanges tokens with the other members.
  void gather(int step, int buffer, const Gathering& gathering);
  /// Calls body(to, from) for each turn of an exchange in group 0: `to` is the member to send to,
  /// `from` the one to receive from.
  template <class Body>
  void each_turn(const Body& body) const {
    const int ranks = static_cast<int>(context_.group.size());
    const int me = context_.group_rank;
    for (int turn = 1; turn < ranks; ++turn) body((me + turn) % ranks, (me + ranks - turn) % ranks);
  }
  /// Copies all batches of a content from the tokens of a buffer that begin at `from_begin`.
  void copy(int step, Content content, int from, LocalPosition from_begin, int to,
            LocalRange to_tokens, HeadRange heads);

  /// The caller's tensors of the rank's own rows.
  [[nodiscard]] RowBuffers own_rows() const;
  /// The rank's own columns in the caller's tensors.
  [[nodiscard]] PlacedColumns own_columns() const;
  /// The query heads that read `kv_heads`.
  [[nodiscard]] HeadRange query_heads(HeadRange kv_heads) const;

  /// Adds a message to an exchange, unless it is empty.
  void send(Slot slot, int peer, int origin, int buffer, LocalRange tokens);
  void receive(Slot slot, int peer, int origin, int buffer, LocalRange tokens);
  /// Adds a message for each run of tokens.
  void send(Slot slot, int peer, int origin, int buffer, const std::vector<LocalRange>& runs);
  void receive(Slot slot, int peer, int origin, int buffer, const std::vector<LocalRange>& runs);

 protected:
  /// Starts a plan with group 0 and without buffers. The references must outlive the object.
  explicit TaskBuilder(const RankContext& context);
  ~TaskBuilder() = default;
  TaskBuilder(const TaskBuilder&) = delete;
  TaskBuilder& operator=(const TaskBuilder&) = delete;

  /// Adds a tensor of the caller: rows or columns of a content, all heads.
  void add_caller(Content content, DType dtype);
  /// The same for other tokens or heads.
  void add_caller(Content content, DType dtype, LocalRange tokens, HeadRange heads);
  /// Adds the caller's bias and dense mask, if the problem has them.
  void add_caller_scores();
  template <class Work>
  void add_task(int step, Work work) {
    plan_.tasks.push_back({std::move(work), step, {}});
  }
  /// Brings the tasks into the order in which they are submitted.
  void order_tasks();

  const RankContext& context_;
  RankPlan plan_;
  int delta_ = -1;

 private:
  void order_messages(Exchange& exchange) const;
  [[nodiscard]] int owner(int reuses) const;
  [[nodiscard]] Exchange& exchange_of(Slot slot);
  [[nodiscard]] Transfer transfer(int peer, int origin, int buffer, LocalRange tokens) const;

  std::map<Slot, std::size_t> exchanges_;  // index of the task
};

}  // namespace annulus::ring
