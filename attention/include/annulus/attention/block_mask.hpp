#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

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
  /// Every block independently with probability `density`; a seed gives the same mask on every
  /// machine.
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
  /// For kernels: rows before this one see the same keys as `row` …
  [[nodiscard]] GlobalPosition end_of_rows(GlobalPosition row) const;
  /// … namely the first run of visible keys in [from, ∞), empty if there is none. It may reach
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

  /// For counting: the number of keys per entry; more than any S if one entry holds all …
  [[nodiscard]] std::int64_t keys_per_entry() const;
  /// … and for each key block, and after the last one, the number of earlier blocks that `row`
  /// sees, summed over the heads.
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

}  // namespace annulus
