#pragma once

#include <cstdint>
#include <vector>

#include <annulus/attention/implementation.hpp>

#include "flash/decode/kernels.hpp"
#include "flash/few_rows.hpp"

namespace annulus::flash::decode {

/// Blocks of few query rows of one problem on one device of compute capability 9.0. Keeps device
/// memory for the blocks that it has seen. One call at a time.
class DecodeAttention {
 public:
  /// Both must outlive it.
  DecodeAttention(const AttentionProblem& problem, Device& device)
      : problem_(problem), device_(device), few_rows_(few_rows(problem)) {}

  /// Whether the block is for it: see FewRows.
  [[nodiscard]] bool takes(const AttentionBlock& block) const;

  // See FlashAttention. The device is current, and the block has rows and columns.
  void prepare(const AttentionBlock& block);
  void run(const AttentionBlock& block, const SoftmaxState& result, Stream& stream);

 private:
  // Blocks of the same sizes, and where their parts lie.
  struct Entry {
    Extents query, key;
    DecodeKernel kernel;
    KeySplit split;
    Tensor part_outputs, part_weights;
  };

  [[nodiscard]] const Entry& find(const AttentionBlock& block);
  [[nodiscard]] Entry make_entry(const AttentionBlock& block) const;

  const AttentionProblem& problem_;
  Device& device_;
  FewRows few_rows_;
  std::vector<Entry> entries_;
};

}  // namespace annulus::flash::decode
