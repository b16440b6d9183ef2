#pragma once

#include <cstddef>
#include <cstdint>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/workspace.hpp>

#include "cudnn/sdpa_block.hpp"
#include "cudnn/sdpa_rows.hpp"

namespace annulus {

/// Computes the gradients of the blocks of one problem on one device by cuDNN. cuDNN rounds each
/// block's gradients to the problem's dtype. Keeps a workspace for the largest block. One call at a
/// time.
class SdpaBackward {
 public:
  /// Both must outlive it.
  SdpaBackward(const AttentionProblem& problem, Device& device)
      : problem_(problem), device_(device), blocks_(problem, device), workspace_(device) {}

  /// Builds the plan and takes the workspace. Throws UnsupportedError for a block that run() cannot
  /// take.
  void prepare(const BackwardBlock& block, const Gradients& gradients);
  /// Adds the block's gradients. Ordered by `stream`.
  void run(const BackwardBlock& block, const Gradients& gradients, Stream& stream);

 private:
  // The parts of the workspace.
  struct Parts {
    cuda::SdpaRows rows;
    TensorView query, key, value;
    std::size_t bytes = 0;  // of these views; the plan's own workspace follows
  };

  void check(const BackwardBlock& block, const Gradients& gradients) const;
  [[nodiscard]] const SdpaKept& find(const AttentionBlock& block);
  // The parts, in memory that begins at `base`. `base` may be null if only the size is asked for.
  [[nodiscard]] Parts parts_of(const AttentionBlock& block, void* base) const;

  const AttentionProblem& problem_;
  Device& device_;
  SdpaBlocks blocks_;
  Workspace workspace_;
};

}  // namespace annulus
