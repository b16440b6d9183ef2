#pragma once

#include <cstdint>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/attention/local_mask.hpp>
#include <annulus/core/workspace.hpp>

#include "flash/decode/kernels.hpp"
#include "flash/few_rows.hpp"

namespace annulus::flash::decode {

/// Blocks of few query rows of one problem on one device of compute capability 9.0. Keeps device
/// memory for the blocks that it has seen. One call at a time.
class DecodeAttention {
 public:
  /// Both must outlive it.
  DecodeAttention(const AttentionProblem& problem, Device& device)
      : problem_(problem), device_(device), few_rows_(few_rows(problem)), workspace_(device) {}

  // The device is current, and blocks have rows and columns.

  /// True if the block is for it: see FewRows.
  [[nodiscard]] bool takes(const AttentionBlock& block) { return find(block) != nullptr; }

  // Prepares for blocks that it takes. See FlashAttention.
  void prepare(const AttentionBlock& block);
  void run(const AttentionBlock& block, const SoftmaxState& result, Stream& stream);

 private:
  // Blocks of the same sizes and, under a mask, positions, and how they are split.
  struct Entry {
    Extents query, key;
    bool unmasked = false;
    PositionRanges rows, columns;
    std::int64_t first_batch = 0;
    DecodeKernel kernel;  // no function: it does not take the block
    KeySplit split;
    Tensor keys;     // of the split
    Tensor planned;  // CallKeys::planned, if calls have lengths or offsets of their own
  };

  /// Null unless it takes the block.
  [[nodiscard]] const Entry* find(const AttentionBlock& block);
  [[nodiscard]] Entry make_entry(const AttentionBlock& block);
  /// The mask of a block by plan. Where calls have their own lengths, all lengths are given.
  [[nodiscard]] LocalMask planned_mask(const AttentionBlock& block) const;
  /// Enqueues what sets the keys of the entry from the call's lengths and offsets.
  void make_keys(const Entry& entry, const AttentionBlock& block, cudaStream_t stream) const;
  [[nodiscard]] bool includes(const AttentionBlock& block, std::int64_t columns) const;

  const AttentionProblem& problem_;
  Device& device_;
  FewRows few_rows_;
  std::vector<Entry> entries_;
  Workspace workspace_;  // weights and outputs of the parts
};

}  // namespace annulus::flash::decode
