#pragma once

#include <annulus/attention/problem.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/ring/sharded_attention.hpp>
#include <annulus/ring/sharded_operands.hpp>
#include <annulus/verification/random_scores.hpp>

#include "launcher/options/options.hpp"
#include "launcher/setup/operand_files.hpp"

namespace annulus::launcher {

/// Gives `problem`, whose shape is valid, the bias and the dense mask of the options, and returns
/// what fills a rank's part of them: slices of their files, or random numbers. Of files, only the
/// headers are read. Throws UserErrors.
[[nodiscard]] verification::ScoreFills set_up_scores(const OperandFiles& files,
                                                     const Options& options,
                                                     AttentionProblem& problem);

/// A rank's parts of bias and dense mask; of rank 0 where there is none.
struct ScoreShards {
  ScoreShards() = default;
  /// Fills them. Throws UserErrors that name options.
  ScoreShards(const verification::ScoreFills& fills, const ring::ShardedOperands& operands,
              int rank, MemoryPool& memory);
  /// Adds views of them.
  void add_to(ring::LocalTensors& tensors) const;
  Tensor bias, mask;
};

}  // namespace annulus::launcher
