#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <annulus/attention/position_rule.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus {

class Mask;

/// The number of queries and keys that share an entry of a BlockMask.
struct BlockSize {
  std::int64_t query = 128;
  std::int64_t kv = 128;
  bool operator==(const BlockSize&) const = default;
};

/// A mask by blocks: query i sees key j iff the entry of block (i / size.query, j / size.kv) is
/// set. Entries are [batch, heads, query blocks, key blocks]; a dimension of 1 is broadcast.
///
/// Blocks may have any size; the GPU kernel is fast if both sizes are multiples of 128. Copies
/// share the entries.
class BlockMask {
 public:
  /// `entries` are 0 or 1, row-major; `shape` may lack leading dimensions, which are then 1. Throws
  /// ArgumentError for sizes below 1, more than 4 dimensions and other entries.
  BlockMask(const Extents& shape, BlockSize size, std::span<const std::uint8_t> entries);

  /// The blocks of T queries and S keys in which `mask` shows any pair, in any head.
  static BlockMask covering(const Mask& mask, std::int64_t batch, std::int64_t query_length,
                            std::int64_t kv_length, BlockSize size = {});
  /// The blocks in which a causal mask shows any pair; likewise for a window (see Mask), for a
  /// window with the first `sinks` keys, and for packed documents (see segments_from_cu_seqlens()).
  static BlockMask causal(std::int64_t query_length, std::int64_t kv_length, BlockSize size = {},
                          std::int64_t offset = 0);
  static BlockMask window(std::int64_t query_length, std::int64_t kv_length, std::int64_t left,
                          std::int64_t right, BlockSize size = {});
  static BlockMask sinks_and_window(std::int64_t query_length, std::int64_t kv_length,
                                    std::int64_t sinks, std::int64_t left, std::int64_t right,
                                    BlockSize size = {});
  static BlockMask documents(std::span<const std::int32_t> cu_seqlens, BlockSize size = {});
  /// Shows the nearest `local` key blocks up to a query block's last position, and every
  /// `stride`-th one (Child et al. 2019).
  static BlockMask strided(std::int64_t query_length, std::int64_t kv_length, std::int64_t local,
                           std::int64_t stride, BlockSize size = {});
  /// Shows every block independently with probability `density`. A seed gives the same mask on
  /// every machine.
  static BlockMask random(std::int64_t query_length, std::int64_t kv_length, std::int64_t heads,
                          double density, std::uint64_t seed, BlockSize size = {});

  [[nodiscard]] BlockSize size() const noexcept { return entries_->size; }
  /// [batch, heads, query blocks, key blocks].
  [[nodiscard]] const Extents& shape() const noexcept { return entries_->shape; }
  [[nodiscard]] std::int64_t batch() const { return shape()[0]; }
  [[nodiscard]] std::int64_t heads() const { return shape()[1]; }
  /// 0 or 1 each, row-major.
  [[nodiscard]] std::vector<std::int32_t> entries() const;
  /// The share of entries that are set; 0 without entries.
  [[nodiscard]] double density() const;
  /// A 64-bit hash.
  [[nodiscard]] std::uint64_t digest() const noexcept { return entries_->digest; }
  bool operator==(const BlockMask& other) const;

  /// Throws ArgumentError("block mask", …) unless the shape can be broadcast to
  /// [batch, heads, ⌈T/size.query⌉, ⌈S/size.kv⌉].
  void validate(std::int64_t batch, std::int64_t heads, std::int64_t query_length,
                std::int64_t kv_length) const;

  /// Here and below, indices are global and refer to the broadcast mask.
  [[nodiscard]] bool visible(std::int64_t batch, std::int64_t head, GlobalPosition row,
                             GlobalPosition column) const;
  /// For kernels: the end of the rows from `row` on that see the same keys as `row`.
  [[nodiscard]] GlobalPosition end_of_rows(GlobalPosition row) const;
  /// The first run of keys in [from, ∞) that `row` sees; empty if there is none. It may reach
  /// beyond the last key.
  struct Run {
    GlobalPosition begin;
    GlobalPosition end;
    [[nodiscard]] bool empty() const { return begin == end; }
  };
  [[nodiscard]] Run next_run(std::int64_t batch, std::int64_t head, GlobalPosition row,
                             GlobalPosition from) const;

  /// All entries, one bit per key block. Each batch, head and query block has a row of whole words.
  [[nodiscard]] std::span<const std::uint64_t> words() const noexcept { return entries_->words; }
  [[nodiscard]] std::int64_t words_per_row() const noexcept { return entries_->words_per_row; }

  /// For counting: the number of keys per entry; more than any S if one entry holds all keys.
  [[nodiscard]] std::int64_t keys_per_entry() const;
  /// For counting: entry i is the number of key blocks before block i that `row` sees, summed over
  /// the heads. There is one more entry than key blocks.
  [[nodiscard]] std::span<const std::uint32_t> shown_before(std::int64_t batch,
                                                            GlobalPosition row) const;

 private:
  struct Entries {
    BlockSize size;
    Extents shape;
    std::int64_t words_per_row = 0;
    std::vector<std::uint64_t> words;         // a bit per key block; each row begins a new word
    std::vector<std::uint32_t> shown_before;  // [batch, query blocks, key blocks + 1]
    std::uint64_t digest = 0;
  };
  template <class IsVisible>
  static BlockMask make(const Extents& shape, BlockSize size, const IsVisible& is_visible);
  explicit BlockMask(std::shared_ptr<const Entries> entries) : entries_(std::move(entries)) {}
  [[nodiscard]] const std::uint64_t* row_of(std::int64_t batch, std::int64_t head,
                                            GlobalPosition row) const;

  std::shared_ptr<const Entries> entries_;
};

/// "blocks 128,128".
[[nodiscard]] std::string to_string(const BlockMask& mask);

/// The visible part of a tile (rows × columns).
struct Visibility {
  std::int64_t pairs = 0;  ///< visible (row, column) pairs, summed over the batches
  bool full = false;       ///< every pair is visible
  bool exact = true;       ///< `pairs` is exact, not an upper bound
  LocalRange rows;         ///< no row outside this range sees anything
  LocalRange columns;      ///< no column outside this range is visible
  [[nodiscard]] bool empty() const { return pairs == 0; }
};

/// Neighbouring positions with the same segment id ≥ 0: a document, or a part of one.
struct SegmentRun {
  std::int32_t id = -1;
  GlobalPosition begin;
  GlobalPosition end;
};

/// The alignment of a document's queries with its keys in two packings: first with first, or last
/// with last.
enum class DocumentAlignment : std::uint8_t { top_left, bottom_right };

struct BandAndBlocks;

/// The keys that each query sees, by global (batch, head, query position, key position).
///
/// A mask is the intersection of its parts (docs/semantics.md §1). It describes the whole batch and
/// sequence, not a shard: every rank can ask about the rows and columns of any rank, and the
/// answers do not depend on the sharding. Tiles are given as strided position ranges. The dense
/// mask is not part of it: it can be as large as the logits, so each rank holds only its own rows
/// (see ScoreTensors).
class Mask {
 public:
  /// Everything visible.
  Mask() = default;

  /// i sees j only if j ≤ i + offset.
  void set_causal(bool causal) { parts_.causal = causal; }
  /// Shifts the diagonal of causal, window and chunk: S − T aligns it with the bottom right.
  /// Throws ArgumentError beyond ±2^48.
  void set_offset(std::int64_t offset);
  /// Sets an offset for each batch, [B]. It replaces the value of set_offset(), and set_offset()
  /// replaces the offsets.
  void set_offsets(std::vector<std::int32_t> offsets);
  /// i sees j only if i + offset − left ≤ j ≤ i + offset + right; −1 is unlimited.
  /// Throws ArgumentError("window", …) for values below −1.
  void set_window(std::int64_t left, std::int64_t right);
  /// Every row sees the keys j < prefix despite causal, window and chunk; 0: none. Throws
  /// ArgumentError("prefix", …) for a negative prefix, or one beyond 2^48.
  void set_prefix(std::int64_t prefix);
  /// Sets a prefix for each batch, [B]. It replaces the value of set_prefix(), and set_prefix()
  /// replaces the prefixes.
  void set_prefixes(std::vector<std::int32_t> prefixes);
  /// Rows see the keys j < tokens that causal shows, despite window and chunk; 0: none. Throws
  /// ArgumentError("sink tokens", …) for a negative number, or one beyond 2^48.
  void set_sink_tokens(std::int64_t tokens);
  /// i sees j only if ⌊(i + offset) / chunk⌋ = ⌊j / chunk⌋; 0: no chunks. Throws
  /// ArgumentError("chunk", …) for a negative chunk, or one beyond 2^48.
  void set_chunk(std::int64_t chunk);
  /// i sees j only if both ids are equal and ≥ 0. Row-major [batch, T] and [batch, S].
  /// Throws ArgumentError("segment ids", …) when sizes do not fit `batch`.
  void set_segments(std::int64_t batch, std::vector<std::int32_t> query_ids,
                    std::vector<std::int32_t> kv_ids);
  /// Packs queries and keys into the same number of documents, alike in each of `batch` rows.
  /// Document d of the queries sees only document d of the keys, and causal, window, prefix, sink
  /// tokens and chunk compare positions inside the document. Prefix sums, [documents + 1]: see
  /// segments_from_cu_seqlens(). Replaces segments. The offset must stay 0, since `alignment`
  /// replaces it; validate() refuses causal, window and chunk without an alignment. Throws
  /// ArgumentError("cu_seqlens_q", …) or ("cu_seqlens_kv", …).
  void set_packings(std::int64_t batch, std::vector<std::int32_t> query_cu_seqlens,
                    std::vector<std::int32_t> kv_cu_seqlens,
                    std::optional<DocumentAlignment> alignment);
  /// Rows (keys) at or past the length of their batch are padding. An empty list means no limit.
  /// Throws ArgumentError for a negative length.
  void set_query_lengths(std::vector<std::int32_t> lengths);
  void set_kv_lengths(std::vector<std::int32_t> lengths);
  /// i sees j only if the block of (i, j) is visible. The only part that may differ by head.
  void set_block_mask(BlockMask blocks) { block_mask_ = std::move(blocks); }

  [[nodiscard]] bool causal() const noexcept { return parts_.causal; }
  [[nodiscard]] std::int64_t offset() const noexcept { return offset_; }
  [[nodiscard]] const std::vector<std::int32_t>& offsets() const noexcept { return offsets_; }
  [[nodiscard]] std::int64_t window_left() const noexcept { return parts_.window_left; }
  [[nodiscard]] std::int64_t window_right() const noexcept { return parts_.window_right; }
  [[nodiscard]] std::int64_t prefix() const noexcept { return prefix_; }
  [[nodiscard]] const std::vector<std::int32_t>& prefixes() const noexcept { return prefixes_; }
  [[nodiscard]] bool has_prefix() const noexcept { return prefix_ > 0 || !prefixes_.empty(); }
  /// Causal, window, sink tokens and chunk.
  [[nodiscard]] const PositionParts& position_parts() const noexcept { return parts_; }
  /// Two packings: their documents, empty if there are none.
  [[nodiscard]] bool has_packings() const noexcept { return !query_cu_seqlens_.empty(); }
  [[nodiscard]] const std::vector<std::int32_t>& query_cu_seqlens() const {
    return query_cu_seqlens_;
  }
  [[nodiscard]] const std::vector<std::int32_t>& kv_cu_seqlens() const { return kv_cu_seqlens_; }
  [[nodiscard]] std::optional<DocumentAlignment> alignment() const { return alignment_; }
  [[nodiscard]] bool has_segments() const noexcept { return !query_segments_.empty(); }
  [[nodiscard]] const std::vector<std::int32_t>& query_lengths() const { return query_lengths_; }
  [[nodiscard]] const std::vector<std::int32_t>& kv_lengths() const { return kv_lengths_; }
  [[nodiscard]] const std::optional<BlockMask>& block_mask() const { return block_mask_; }
  /// True if the mask has any part.
  [[nodiscard]] bool hides_any() const {
    return parts_.limited() || has_segments() || !query_lengths_.empty() || !kv_lengths_.empty() ||
           block_mask_;
  }
  /// True if one band expresses all parts that compare positions, in every batch and document.
  [[nodiscard]] bool one_band() const;
  /// Causal and window together, where one_band() holds.
  [[nodiscard]] Band band() const;
  /// The parts that compare positions, for one row. The row must not be padding of a packing.
  [[nodiscard]] PositionRule position_rule(std::int64_t batch, GlobalPosition row) const;
  /// True if visibility can differ between batches, or between query heads.
  [[nodiscard]] bool depends_on_batch() const {
    return has_segments() || !query_lengths_.empty() || !kv_lengths_.empty() || !offsets_.empty() ||
           !prefixes_.empty() || (block_mask_ && block_mask_->batch() != 1);
  }
  [[nodiscard]] bool depends_on_head() const { return block_mask_ && block_mask_->heads() != 1; }
  /// Throws ArgumentError unless segments and lengths fit [batch, T] and [batch, S], offsets and
  /// prefixes fit [batch], and the block mask fits [batch, heads, T, S]. Also throws it for
  /// packings without an alignment if positions matter.
  void validate(std::int64_t batch, std::int64_t heads, std::int64_t query_length,
                std::int64_t kv_length) const;

  /// A 64-bit hash, for comparing masks between ranks.
  [[nodiscard]] std::uint64_t digest() const;

  /// True if `row` sees `column`; this defines the mask. `head` is the global query head.
  [[nodiscard]] bool visible(std::int64_t batch, std::int64_t head, GlobalPosition row,
                             GlobalPosition column) const;

  /// The visible part of a tile in batches [batch, batch + batches). Pairs and `full` are exact,
  /// except that with very many short segments or chunks `pairs` is an upper bound and `full` is
  /// false. The hulls are exact for one batch of unstrided ranges; otherwise they may be too wide.
  /// If ids ascend with the position, as in packed sequences, the cost is linear in the documents
  /// that rows and columns share; otherwise, in all documents of the rows. With a block mask, each
  /// document costs its query blocks and the key blocks at its edges, for any number of heads.
  ///
  /// If heads differ, `pairs` is the mean over all heads, rounded up in each batch (and then not
  /// `exact`); `full` means in all heads; the hulls cover all heads.
  [[nodiscard]] Visibility examine(std::int64_t batch, std::int64_t batches,
                                   const PositionRange& rows, const PositionRange& columns) const;
  /// The same for one batch and one query head.
  [[nodiscard]] Visibility examine_head(std::int64_t batch, std::int64_t head,
                                        const PositionRange& rows,
                                        const PositionRange& columns) const;
  /// The same for segments and lengths alone, without positions and blocks, in one batch. If
  /// the pairs are exact, so are the hulls.
  [[nodiscard]] Visibility examine_without_band(std::int64_t batch, const PositionRange& rows,
                                                const PositionRange& columns) const;

  /// For kernels, one row at a time: two intervals, disjoint and in order, each possibly empty.
  /// Columns outside both are hidden. Inside, columns in hidden blocks are hidden, and columns
  /// whose segment id is negative or differs from the row's.
  struct Interval {
    GlobalPosition begin;
    GlobalPosition end;
  };
  [[nodiscard]] std::array<Interval, 2> row_intervals(std::int64_t batch, GlobalPosition row) const;
  /// Segment ids by global position; empty without segments.
  [[nodiscard]] std::span<const std::int32_t> query_segments(std::int64_t batch) const;
  [[nodiscard]] std::span<const std::int32_t> kv_segments(std::int64_t batch) const;

  /// For planners, one document at a time: the runs of a batch that overlap [begin, end) of the
  /// queries, in order of position; empty without segments.
  [[nodiscard]] std::span<const SegmentRun> query_runs(std::int64_t batch, GlobalPosition begin,
                                                       GlobalPosition end) const;
  /// The runs of keys in a batch: with this id, in order of position; or with any id, in order of
  /// id.
  [[nodiscard]] std::span<const SegmentRun> kv_runs(std::int64_t batch, std::int32_t id) const;
  [[nodiscard]] std::span<const SegmentRun> kv_runs(std::int64_t batch) const;

 private:
  /// Ids of every position, and their runs: per batch, query runs in order of position, key runs in
  /// order of (id, position). `ascending` if both orders agree and no id comes twice.
  class Segments {
   public:
    Segments() = default;
    Segments(std::int64_t batch, std::vector<std::int32_t> ids, bool by_id);
    [[nodiscard]] bool empty() const noexcept { return runs_.empty(); }
    [[nodiscard]] std::int64_t length() const noexcept { return length_; }
    [[nodiscard]] std::int64_t batches() const noexcept {
      return static_cast<std::int64_t>(runs_.size());
    }
    [[nodiscard]] std::span<const std::int32_t> ids(std::int64_t batch) const;
    [[nodiscard]] const std::vector<SegmentRun>& runs(std::int64_t batch) const {
      return runs_[static_cast<std::size_t>(batch)];
    }
    [[nodiscard]] bool ascending(std::int64_t batch) const {
      return ascending_[static_cast<std::size_t>(batch)];
    }

   private:
    std::int64_t length_ = 0;
    std::vector<std::int32_t> ids_;
    std::vector<std::vector<SegmentRun>> runs_;
    std::vector<bool> ascending_;
  };

  [[nodiscard]] const BlockMask* blocks() const { return block_mask_ ? &*block_mask_ : nullptr; }
  /// The origin of positions in a batch row, or in one of its documents.
  [[nodiscard]] PositionFrame frame(std::int64_t batch, std::int32_t document) const;
  /// Pairs are summed over the heads.
  [[nodiscard]] Visibility examine_one(const BandAndBlocks& seen, bool by_position,
                                       const PositionRange& rows,
                                       const PositionRange& columns) const;

  PositionParts parts_;
  std::int64_t offset_ = 0;
  std::vector<std::int32_t> offsets_;
  std::int64_t prefix_ = 0;
  std::vector<std::int32_t> prefixes_;
  std::vector<std::int32_t> query_cu_seqlens_;
  std::vector<std::int32_t> kv_cu_seqlens_;
  std::optional<DocumentAlignment> alignment_;
  Segments query_segments_;
  Segments kv_segments_;
  std::vector<std::int32_t> query_lengths_;
  std::vector<std::int32_t> kv_lengths_;
  std::optional<BlockMask> block_mask_;
};

/// Makes segment ids 0, 1, … of packed documents from their prefix sum (docs/semantics.md §1). The
/// prefix sum starts at 0, never decreases (a document may be empty) and ends at `length`. Throws
/// ArgumentError(name, …), naming the first wrong entry.
[[nodiscard]] std::vector<std::int32_t> segments_from_cu_seqlens(
    std::span<const std::int32_t> cu_seqlens, std::int64_t length, const char* name = "cu_seqlens");

/// "causal, offset 3, window 100,0, segments, blocks 128,128"; "none" when everything is visible.
[[nodiscard]] std::string to_string(const Mask& mask);

}  // namespace annulus
