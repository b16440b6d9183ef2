#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/workspace.hpp>

#include "flash/backward/arguments.hpp"
#include "flash/backward/tile_lists.hpp"

namespace annulus::flash::backward {

/// Gradients of the blocks of one problem on one device of compute capability 9.0: head dimensions
/// that with_head_dims() takes; above 128, and for float32, no bias, dense mask and dropout.
/// float32 takes head dimensions up to 128. Keeps a workspace that is as large as the largest block
/// needs. One call at a time.
class FlashBackward {
 public:
  /// Both must outlive it.
  FlashBackward(const AttentionProblem& problem, Device& device)
      : problem_(problem), device_(device), workspace_(device) {}

  /// Does in advance what the first run() of such a block would do before it launches. Throws
  /// UnsupportedError for strides and addresses that run() cannot take.
  void prepare(const BackwardBlock& block, const Gradients& gradients);
  /// Adds the block's gradients. Ordered by `stream`.
  void run(const BackwardBlock& block, const Gradients& gradients, Stream& stream);

 private:
  // Positions and batches of a block under a mask, and what of them is visible.
  struct Entry {
    PositionRanges rows, columns;
    BatchesAndHeads of;
    bool unmasked = false;
    std::unique_ptr<TileLists> lists = {};  // if the rest does not say it
    std::int32_t low = 0, high = 0;
    Tensor row_lengths = {}, column_lengths = {};  // without elements where no batch is cut
  };

  [[nodiscard]] const Entry& find(const BackwardBlock& block);
  [[nodiscard]] Entry make_entry(const BackwardBlock& block) const;
  void check(const BackwardBlock& block, const Gradients& gradients) const;
  [[nodiscard]] Arguments arguments_of(const BackwardBlock& block, const Gradients& gradients);

  const AttentionProblem& problem_;
  Device& device_;
  std::vector<Entry> entries_;
  Workspace workspace_;  // LSE and delta
};

}  // namespace annulus::flash::backward
