#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/attention/mask.hpp>
#include <annulus/core/position.hpp>

#include "flash/batches_and_heads.hpp"
#include "flash/lists/list_input.hpp"

namespace annulus::flash {

/// The question that masked tiles ask of the ids of their rows and columns.
enum class Asked : std::uint8_t {
  nothing,
  documents,  ///< of the rows; the keys of every id are neighbours
  ids,        ///< of rows and columns
};

/// The mask with numbers for every part that is a call argument, so that its plans serve all calls.
[[nodiscard]] Mask mask_of_calls(const AttentionProblem& problem);

/// The input with the numbers of a call for batches from `first_batch` on, where the mask of its
/// plan has such parts.
[[nodiscard]] ListInput with_arguments(ListInput input, const CallArgumentArrays& called,
                                       std::int64_t first_batch);

/// The host's part of a block's lists, before a device makes them: their input, and the space
/// that they take. Costs O(query tiles + runs of ids); with a block mask, also one pass over its
/// words. Positions must lie below 2^28.
class ListPlan {
 public:
  /// Tiles have tile_rows × tile_columns entries and begin anew with each position range, rows also
  /// with each query block and columns behind each hidden key block. The mask must outlive the
  /// plan.
  ListPlan(const Mask& mask, const BatchesAndHeads& of, const PositionRanges& rows,
           const PositionRanges& columns, int tile_rows, int tile_columns);

  /// input() points into the given arrays: numbers() and blocks(), or copies of them.
  [[nodiscard]] const std::vector<std::int32_t>& numbers() const { return numbers_; }
  [[nodiscard]] std::span<const std::uint64_t> blocks() const { return blocks_; }
  [[nodiscard]] ListInput input(const std::int32_t* numbers, const std::uint64_t* blocks) const;

  [[nodiscard]] std::int64_t batches() const { return input_.batches; }
  [[nodiscard]] std::int64_t heads() const { return input_.heads; }
  [[nodiscard]] std::int32_t tiles_per_list() const { return input_.row_tile_count; }
  [[nodiscard]] std::int64_t tiles() const { return batches() * heads() * tiles_per_list(); }
  /// An upper bound on the number of segments.
  [[nodiscard]] std::int64_t most_segments() const { return most_segments_; }
  /// True if some segment may hide values; see KeySegment::kHidesValues.
  [[nodiscard]] bool may_hide_values() const { return may_hide_values_; }
  [[nodiscard]] Asked asked() const { return asked_; }
  /// True if masked tiles need the RowKeys of their rows: for documents, or for positions that one
  /// band does not describe.
  [[nodiscard]] bool needs_row_keys() const {
    return asked_ == Asked::documents || input_.by_rule != 0;
  }

 private:
  // The index in numbers() at which an array of the input begins.
  struct Place {
    static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
    std::size_t first = kNone;
  };
  template <class T>
  [[nodiscard]] Place add(const std::vector<T>& values);

  void add_rows(const Mask& mask, const PositionRanges& rows, int tile_rows);
  void add_columns(const PositionRanges& columns);
  void add_positions(const Mask& mask, const BatchesAndHeads& of);
  void add_ids(const Mask& mask, const BatchesAndHeads& of);
  void add_blocks(const BlockMask& blocks, const BatchesAndHeads& of);
  void count_segments(const Mask& mask, const BatchesAndHeads& of, const PositionRanges& columns);
  [[nodiscard]] bool finds_hidden_values(const Mask& mask, const PositionRanges& columns) const;

  ListInput input_;  // with null pointers
  std::vector<std::int32_t> numbers_;
  std::span<const std::uint64_t> blocks_;
  Place row_tiles_at_, column_ranges_at_, query_lengths_at_, kv_lengths_at_;
  Place offsets_at_, prefixes_at_, query_cu_seqlens_at_, kv_cu_seqlens_at_;
  Place query_runs_at_, key_runs_at_, first_query_run_at_, first_key_run_at_;

  std::vector<RowTile> row_tiles_;
  std::int64_t most_segments_ = 0;
  bool may_hide_values_ = false;
  Asked asked_ = Asked::nothing;
};

}  // namespace annulus::flash
