#pragma once

#include <annulus/attention/problem.hpp>
#include <annulus/verification/random_scores.hpp>

#include "launcher/options/options.hpp"
#include "launcher/setup/operand_files.hpp"

namespace annulus::launcher {

/// Sets bias and dense mask of `problem`, whose shape must be valid, from the options. Returns
/// functions that fill a rank's part, from slices of files or with random numbers. Reads only the
/// headers of the files. Throws UserErrors.
[[nodiscard]] verification::OperandFills set_up_scores(const OperandFiles& files,
                                                       const Options& options,
                                                       AttentionProblem& problem);

}  // namespace annulus::launcher
