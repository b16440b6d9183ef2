#pragma once

#include <optional>
#include <vector>

#include "schedules/building/gathering.hpp"
#include "schedules/building/task_builder.hpp"

namespace annulus::ring {

/// Rows that are sent to the columns: the queries' rows, and rows of a bias and a dense mask that
/// differ from row to row.
class PassedRows {
 public:
  /// `cut`: bias and mask are cut to the columns of the rank that computes. The builder must
  /// outlive the object.
  PassedRows(TaskBuilder& builder, bool cut)
      : builder_(builder), contents_(builder.sent_with_rows()), cut_(cut) {}

  /// The contents that are sent, queries first.
  [[nodiscard]] const std::vector<Content>& contents() const noexcept { return contents_; }
  /// The rank's own rows, copied in a step to be sent to a member of the group. `reuses`: a buffer
  /// whose memory they take over.
  int pack(int step, Content content, int to, int reuses = -1);
  /// A buffer for rows of others.
  int add_of_others(Content content, LocalRange rows, int reuses = -1);
  /// Buffers of a bias or a mask that serve others' rows as well; −1 if it comes with these rows.
  /// If one of the two does, the other one is cut as well, since kernels want both for the same
  /// columns.
  [[nodiscard]] RowBuffers for_all();
  /// The same, but a bias or a mask that comes with the rows gets a buffer of all ranks' rows. The
  /// rows are exchanged in this step. Each rank gets them for its own columns.
  [[nodiscard]] RowBuffers gathered_scores(int step, const Gathering& rows);

 private:
  [[nodiscard]] HeadRange heads() const { return {0, builder_.plan().local.heads}; }
  [[nodiscard]] std::optional<PositionRanges> columns_of(int member) const;

  TaskBuilder& builder_;
  std::vector<Content> contents_;
  bool cut_;
};

}  // namespace annulus::ring
