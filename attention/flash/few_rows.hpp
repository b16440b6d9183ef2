#pragma once

#include <annulus/attention/implementation.hpp>

#include "flash/has_modifiers.hpp"

namespace annulus::flash {

/// For the kernel in decode/. Beyond 32 rows its products take longer than reading, and the default
/// kernel, with a multiprocessor for each tile, is faster if there are enough tiles. Where keys are
/// few, writing and reading the parts would take longer than the keys. How keys are shared out, and
/// bits with it, depends on the block's rows and heads.
[[nodiscard]] inline FewRows few_rows(const AttentionProblem& problem) {
  if (problem.dtype == DType::float32 || has_modifiers(problem)) return {};
  if (problem.in_global_order()) return {};
  Mask mask = problem.mask;
  if (problem.call_arguments.offsets) mask.set_offset(0);  // any, as the kernel adds them itself
  const bool banded = mask.one_band() && !mask.has_segments() && !mask.block_mask();
  return {.most = 64, .always = 32, .tiles = 132, .columns = 16, .rate = 125e12, .banded = banded};
}

}  // namespace annulus::flash
