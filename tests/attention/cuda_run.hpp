#pragma once

#include <vector>

#include <annulus/core/cuda_stream.hpp>

#include "tests/attention/device_run.hpp"
#include "tests/support/cuda_test.hpp"

namespace annulus::test {

/// The expected result of a part of the columns: the CPU kernel's, which the suite compares
/// with the oracle.
inline OracleOutput reference_of(const AttentionProblem& problem, const AttentionBlock& block) {
  const Result result = run_native(problem, block, 2);
  const auto* output = result.output.view().as<float>();
  const auto* lse = result.lse.view().as<float>();
  return {std::vector<double>(output, output + result.output.shape().product()),
          std::vector<double>(lse, lse + result.lse.shape().product())};
}

}  // namespace annulus::test
