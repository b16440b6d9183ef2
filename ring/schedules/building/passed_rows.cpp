#include "schedules/building/passed_rows.hpp"

#include <cstddef>

namespace annulus::ring {

int PassedRows::pack(int step, Content content, int to, int reuses) {
  const int packed =
      builder_.add_row_buffer(content, builder_.all_rows(), heads(), reuses, columns_of(to));
  builder_.copy_own(step, packed);
  return packed;
}

int PassedRows::add_of_others(Content content, LocalRange rows, int reuses) {
  return builder_.add_row_buffer(content, rows, heads(), reuses,
                                 columns_of(builder_.context().group_rank));
}

RowBuffers PassedRows::for_all() {
  RowBuffers buffers = builder_.own_rows();
  for (const Content content : contents_) buffers[content] = -1;
  if (contents_.size() == 1 || !cut_) return buffers;
  const LocalRange one{LocalPosition(0), 1};
  for (const Content content : {Content::bias, Content::dense_mask}) {
    if (buffers[content] < 0) continue;
    buffers[content] = add_of_others(content, one);
    builder_.copy_own(0, buffers[content]);
  }
  return buffers;
}

RowBuffers PassedRows::gathered_scores(int step, const Gathering& rows) {
  const int me = builder_.context().group_rank;
  RowBuffers buffers = for_all();
  for (const Content content : contents_) {
    if (content == Content::query) continue;
    buffers[content] = add_of_others(content, rows.all());
    builder_.copy_own(step, buffers[content], rows, me);
    builder_.each_turn([&](int to, int from) {
      if (builder_.all_rows().count > 0) {
        builder_.send(step, to, me, pack(step, content, to), rows.tokens(me));
      }
      builder_.receive(step, from, from, buffers[content], rows.placed(from));
    });
  }
  return buffers;
}

std::optional<PositionRanges> PassedRows::columns_of(int member) const {
  if (!cut_) return std::nullopt;
  const RankContext& context = builder_.context();
  return context.input.operands.key.positions(context.group[static_cast<std::size_t>(member)], 1);
}

}  // namespace annulus::ring
