#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/workspace.hpp>

#include "flash/backward/arguments.hpp"
#include "flash/backward/tile_lists.hpp"

namespace annulus::flash::backward {

/// Computes the gradients of the blocks of one problem on one device of compute capability 9.0.
/// Half types take the head dimensions of with_head_dims(), float32 takes up to 128. Bias, dense
/// mask and dropout need a half type. Keeps a workspace for the largest block, and those of smaller
/// blocks that came before. One call at a time.
class FlashBackward {
 public:
  /// Both must outlive it.
  FlashBackward(const AttentionProblem& problem, Device& device)
      : problem_(problem),
        device_(device),
        workspace_(device),
        multiprocessors_(cuda_multiprocessors(device.place())) {}

  /// Does in advance what the first run() of such a block would do before it launches. Throws
  /// UnsupportedError for strides and addresses that run() cannot take.
  void prepare(const BackwardBlock& block, const Gradients& gradients);
  /// Adds the block's gradients. Ordered by `stream`.
  void run(const BackwardBlock& block, const Gradients& gradients, Stream& stream);

 private:
  // Positions and batches of a block under a mask, and their visible part.
  struct Entry {
    PositionRanges rows, columns;
    BatchesAndHeads of;
    bool unmasked = false;
    std::unique_ptr<TileLists> lists = {};  // if band and lengths do not suffice
    std::int32_t low = 0, high = 0;
    Tensor row_lengths = {}, column_lengths = {};  // without elements where no batch is cut
  };

  [[nodiscard]] const Entry& find(const BackwardBlock& block);
  [[nodiscard]] Entry make_entry(const BackwardBlock& block) const;
  struct Extent {
    // Rows of a head that the key tiles running at a time see. They should stay in L2.
    double rows_at_a_time;
    std::int64_t key_tiles;  // the most key tiles of wide heads that a query tile sees
  };
  // Sets which pairs are visible.
  Extent set_mask(Arguments& arguments, const BackwardBlock& block);
  // Sets the order of work.
  void set_order(Arguments& arguments, double rows_at_a_time, bool in_turns) const;
  // Reserves the workspace, and points the arguments into it.
  void set_workspace(Arguments& arguments, const BackwardBlock& block, bool wants_query);
  [[nodiscard]] Arguments arguments_of(const BackwardBlock& block, const Gradients& gradients);

  const AttentionProblem& problem_;
  Device& device_;
  std::vector<Entry> entries_;
  // LSE, delta and turns; for float16, OutputScale and a copy of dO; for wide heads, dS.
  Workspace workspace_;
  int multiprocessors_;
};

}  // namespace annulus::flash::backward
