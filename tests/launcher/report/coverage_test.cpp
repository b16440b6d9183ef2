#include "launcher/report/coverage.hpp"

#include <algorithm>
#include <span>
#include <string>

#include <gtest/gtest.h>

namespace annulus::launcher {
namespace {

std::string line(const Coverage& coverage, const std::string& name) {
  const auto lines = coverage.lines();
  const auto found =
      std::find_if(lines.begin(), lines.end(), [&](const auto& one) { return one.first == name; });
  return found == lines.end() ? "no line" : found->second;
}

TEST(Coverage, CountsWhatCame) {
  Coverage coverage;
  verification::ShardedCase sharded;
  AttentionProblem& problem = sharded.problem;
  problem.shape = {1, 4, 4, 2, 1, 8, 8};
  problem.mask.set_causal(true);
  ring::OperandLayout& layout = sharded.layout;
  layout.sequence = LayoutKind::striped;
  const auto fill = [](const TensorView&, std::span<const PositionRanges>) {};
  sharded.fills.key = fill;
  coverage.add(sharded, "ring");
  problem.bias = Extents{1, 1, 4, 4};
  problem.sinks = Sinks({1}, {1});
  problem.dtype = DType::bfloat16;
  problem.normalize_output = false;
  problem.softmax_dtype = DType::float64;
  layout.kv_sequence = LayoutKind::striped;  // as the queries
  sharded.fills.query = fill;
  coverage.add(sharded, "local");
  problem = {};
  problem.dtype = DType::float64;
  layout.kv_sequence = LayoutKind::zigzag;
  sharded.fills = {};
  coverage.add(sharded, "local");
  EXPECT_EQ(line(coverage, "masks by position"),
            "causal masks 2, windows 0, a prefix 0, sink tokens 0, chunks 0");
  EXPECT_EQ(line(coverage, "masks by batch"),
            "an offset per batch 0, positions inside documents 0, segment ids 0, lengths 0");
  EXPECT_EQ(line(coverage, "masks by entry"), "a block mask 0, a dense mask 0");
  EXPECT_EQ(line(coverage, "modifiers"),
            "a soft cap 0, dropout 0, a bias 1, an unnormalised output 1, sinks 1");
  EXPECT_EQ(line(coverage, "pairs of parts"),
            "6 of 120; never causal masks with windows, causal masks with a prefix and 112 more");
  EXPECT_EQ(line(coverage, "layouts"),
            "contiguous 0, zigzag 0, striped 3, balanced 0, another one for keys 1");
  EXPECT_EQ(line(coverage, "dtypes"),
            "float32 1, float16 0, bfloat16 1, float64 1, a softmax in float64 1");
  EXPECT_EQ(line(coverage, "schedules"), "local 2, ring 1");
  EXPECT_EQ(line(coverage, "NaN and infinities"), "in keys and values 2, in queries too 1");
  EXPECT_EQ(line(coverage, "rows of bias or mask"), "local 1");
  EXPECT_EQ(line(coverage, "backward passes"), "none");
  coverage.add_backward("ring", {true, false});
  coverage.add_backward("local", {true, true});
  EXPECT_EQ(line(coverage, "backward passes"),
            "local 1, ring 1; with a gradient of the LSE 2, added 1");
  EXPECT_EQ(line(coverage, "without a backward pass"),
            "NaN or infinities 1, others 1, unnormalised outputs 1");
}

}  // namespace
}  // namespace annulus::launcher
