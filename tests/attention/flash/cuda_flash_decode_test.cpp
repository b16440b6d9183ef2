// The flash kernel for few query rows, against the oracle.
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "flash/decode/decode_attention.hpp"
#include "flash/flash_attention.hpp"
#include "tests/attention/flash/cuda_flash_run.hpp"
#include "tests/attention/non_finite.hpp"

namespace annulus::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class CudaFlashDecode : public CudaFlashTest {
 protected:
  CudaFlashDecode() : CudaFlashTest("flash_attn2") {}

  [[nodiscard]] bool takes(const AttentionProblem& problem, const AttentionBlock& block) const {
    return flash::decode::DecodeAttention(problem, *device_).takes(block);
  }
  [[nodiscard]] AttentionBlock block_of(const WholeAttention& whole) const {
    AttentionBlock block = whole.block();
    block.unmasked = true;
    EXPECT_TRUE(takes(whole.problem, block)) << to_string(whole.problem.shape);
    return block;
  }
  [[nodiscard]] Result run(const WholeAttention& whole, DType lse = DType::float32) const {
    return run_on_device(implementation(), whole.problem, block_of(whole), *device_, *stream_, lse);
  }
  void expect_decode_accurate(const WholeAttention& whole) {
    expect_block_accurate(whole.problem, block_of(whole), whole.oracle());
  }
  void expect_masked_accurate(const WholeAttention& whole) {
    ASSERT_TRUE(takes(whole.problem, whole.block()))
        << to_string(whole.problem.shape) << to_string(whole.problem.mask);
    expect_whole_accurate(whole);
  }
};

TEST_F(CudaFlashDecode, TakesFewVisibleRows) {
  Random random(200);
  const AttentionProblem problem = half_problem({1, 8, 1024, 16, 2, 64, 64});
  const WholeAttention whole = random_attention(random, problem);
  AttentionBlock block = block_of(whole);
  const std::int32_t arrived = 0;
  block.arrived_from = &arrived;
  EXPECT_FALSE(takes(problem, block));
  for (const AttentionProblem& other :
       {half_problem({1, 9, 1024, 16, 2, 64, 64}), half_problem({1, 8, 1023, 16, 2, 64, 64}),
        half_problem({9, 8, 1024, 16, 2, 64, 64}),
        half_problem({1, 8, 1024, 16, 2, 64, 64}, DType::float32)}) {
    const WholeAttention not_few = random_attention(random, other);
    block = not_few.block();
    block.unmasked = true;
    EXPECT_FALSE(takes(other, block)) << to_string(other.shape);
  }
}

TEST_F(CudaFlashDecode, HeadDimensions) {
  Random random(201);
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const auto& [dim, value_dim] :
         {std::pair{64, 64}, std::pair{128, 128}, std::pair{192, 128}, std::pair{256, 256},
          std::pair{8, 40}, std::pair{80, 80}, std::pair{96, 64}, std::pair{160, 104},
          std::pair{200, 136}, std::pair{64, 256}}) {
      for (const std::int64_t rows : {1, 3, 7}) {
        AttentionProblem problem = half_problem({2, rows, 1000, 16, 2, dim, value_dim}, dtype);
        expect_decode_accurate(random_attention(random, problem));
        problem.soft_cap = 2.0;
        expect_decode_accurate(random_attention(random, problem));
      }
    }
  }
}

// Keys that end inside a tile, and in the middle of what a warp takes.
TEST_F(CudaFlashDecode, Lengths) {
  Random random(202);
  for (const std::int64_t columns : {128, 129, 143, 144, 145, 191, 192, 193, 500, 4097, 40000}) {
    for (const std::int64_t dim : {64, 128, 256}) {
      expect_decode_accurate(
          random_attention(random, half_problem({1, 1, columns, 8, 1, dim, dim})));
    }
  }
}

// All numbers of warps for the same rows, and rows that leave some without.
TEST_F(CudaFlashDecode, RowsAndHeads) {
  Random random(203);
  for (const auto& [rows, heads, kv_heads] :
       {std::tuple{1, 1, 1}, std::tuple{1, 64, 8}, std::tuple{16, 4, 4}, std::tuple{17, 2, 2},
        std::tuple{1, 33, 1}, std::tuple{5, 9, 3}, std::tuple{6, 16, 2}, std::tuple{64, 3, 3},
        std::tuple{1, 64, 1}, std::tuple{50, 3, 3}}) {
    for (const std::int64_t dim : {64, 128, 256}) {
      expect_decode_accurate(
          random_attention(random, half_problem({2, rows, 1111, heads, kv_heads, dim, dim})));
    }
  }
}

// More pairs of batch and head than multiprocessors: a thread block has whole pairs and parts.
TEST_F(CudaFlashDecode, ManyBatches) {
  Random random(204);
  expect_decode_accurate(random_attention(random, half_problem({37, 1, 300, 64, 8, 128, 128})));
  expect_decode_accurate(random_attention(random, half_problem({300, 2, 100, 4, 2, 64, 64})));
}

TEST_F(CudaFlashDecode, HugeAndTinyLogits) {
  Random random(205);
  for (const double scale : {1e-4, 3.0, 30.0}) {
    AttentionProblem problem = half_problem({1, 1, 3000, 8, 1, 128, 128});
    problem.scale = scale;
    const WholeAttention whole = random_attention(random, problem);
    const Error error = error_of(run(whole), problem.dtype, whole.oracle());
    EXPECT_LE(error.output, accuracy_bound(problem.dtype, 3000).output) << scale;
    EXPECT_LE(error.lse, 2e-3 * std::max(1.0, scale)) << scale;
  }
}

TEST_F(CudaFlashDecode, NonFiniteEntriesStayWhereTheyAreSeen) {
  Random random(206);
  const AttentionProblem problem = half_problem({1, 1, 1000, 16, 2, 128, 128});
  const WholeAttention clean = random_attention(random, problem);
  const Result before = run(clean);
  for (const bool in_keys : {true, false}) {
    const NonFinite entries{in_keys, kNan, {0, 517, 999}};
    expect_confined(clean, entries, before, run(with_non_finite(clean, entries)));
  }
}

// Their weight is 0/0, and the LSE says that there is none.
TEST_F(CudaFlashDecode, RowsWithoutWeight) {
  Random random(207);
  WholeAttention whole = random_attention(random, half_problem({1, 1, 300, 2, 1, 64, 64}));
  for (std::int64_t d = 0; d < 64; ++d) {
    const float value = d == 0 ? 1.0F : 0.0F;
    for (std::int64_t n = 0; n < 2; ++n) {
      from_float32(&value, DType::bfloat16, whole.query.view().address({0, 0, n, d}), 1);
    }
  }
  const float nothing = -kInfinity;
  for (std::int64_t j = 0; j < 300; ++j) {
    from_float32(&nothing, DType::bfloat16, whole.key.view().address({0, j, 0, 0}), 1);
  }
  const Result result = run(whole);
  for (std::int64_t n = 0; n < 2; ++n) {
    EXPECT_EQ(result.lse.view().as<float>()[n], -kInfinity);
    for (std::int64_t d = 0; d < 64; ++d) {
      EXPECT_TRUE(std::isnan(result.output.view().as<float>()[64 * n + d]));
    }
  }
}

// The last part may round.
TEST_F(CudaFlashDecode, ContinuesAState) {
  Random random(208);
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const DType last : {DType::float32, DType::bfloat16}) {
      const AttentionProblem problem = half_problem({2, 3, 2000, 8, 2, dim, dim});
      const WholeAttention whole = random_attention(random, problem);
      flash::decode::DecodeAttention attention(problem, *device_);
      const Result result = in_parts(*device_, *stream_, whole, {{500, 1500}, {0, 250}, {250, 250}},
                                     last, [&](AttentionBlock& block, const SoftmaxState& into) {
                                       block.unmasked = true;
                                       ASSERT_TRUE(attention.takes(block));
                                       attention.run(block, into, *stream_);
                                     });
      SCOPED_TRACE(to_string(problem.shape));
      expect_accurate(result, whole, whole.oracle());
    }
  }
}

TEST_F(CudaFlashDecode, RepeatsItsBits) {
  Random random(209);
  const WholeAttention whole =
      random_attention(random, half_problem({1, 1, 50000, 64, 8, 128, 128}));
  const Result first = run(whole);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(run(whole) == first);
}

// Lengths of all kinds, none among them, with all numbers of rows.
TEST_F(CudaFlashDecode, UnequalLengths) {
  Random random(210);
  const std::int64_t dims[] = {64, 128, 256};
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const std::int64_t shift : {0, 1}) {
      for (std::int64_t rows = 1; rows <= 8; ++rows) {
        const std::int64_t dim = dims[(rows + shift) % 3];
        AttentionProblem problem = half_problem({7, rows, 5001, 8, 2, dim, dim}, dtype);
        problem.mask.set_kv_lengths({5001, 0, 1, 127, 2049, 128, 777});
        if (rows % 2 == 0) {
          const auto all = static_cast<std::int32_t>(rows);
          problem.mask.set_query_lengths({all, all, all, 1, 0, all, 2});
        }
        if (rows % 3 == 0) problem.soft_cap = 20.0;
        expect_masked_accurate(random_attention(random, problem));
      }
    }
  }
}

// A few appended rows: the corner is theirs alone.
TEST_F(CudaFlashDecode, CausalCornerAndWindows) {
  Random random(212);
  for (const std::int64_t dim : {64, 128, 256}) {
    for (std::int64_t rows = 1; rows <= 8; ++rows) {
      for (const std::int64_t left : {-1, 1500, 999}) {
        AttentionProblem problem =
            causal_half_problem({2, rows, 2000 + rows, 16, 4, dim, dim}, 2000);
        if (left >= 0) problem.mask.set_window(left, -1);
        if (rows % 4 == 0) problem.soft_cap = 2.0;
        expect_masked_accurate(random_attention(random, problem));
      }
    }
  }
}

// Corner and lengths: some batches have fewer keys than the corner.
TEST_F(CudaFlashDecode, CornersOfUnequalLengths) {
  Random random(213);
  for (const std::int64_t rows : {2, 4, 16}) {
    AttentionProblem problem = causal_half_problem({5, rows, 4000, 4, 2, 128, 64}, 3985);
    problem.mask.set_kv_lengths({4000, 3990, 2, 0, 3986});
    expect_masked_accurate(random_attention(random, problem));
    problem.mask.set_window(2, 3);
    const WholeAttention whole = random_attention(random, problem);
    EXPECT_FALSE(takes(problem, whole.block()));  // too few keys
    expect_whole_accurate(whole);
  }
}

TEST_F(CudaFlashDecode, OtherMasksAreNotForIt) {
  Random random(214);
  AttentionProblem problem = half_problem({1, 2, 1000, 8, 1, 64, 64});
  problem.mask.set_segments(1, std::vector<std::int32_t>(2, 1), std::vector<std::int32_t>(1000, 1));
  const WholeAttention whole = random_attention(random, problem);
  EXPECT_FALSE(takes(problem, whole.block()));
  expect_whole_accurate(whole);
  // Rows and columns whose diagonal is not straight.
  problem.mask = Mask();
  problem.mask.set_causal(true);
  problem.mask.set_offset(998);
  AttentionBlock block = whole.block();
  block.columns = PositionRanges({PositionRange{GlobalPosition(0), 1000, 2}});
  EXPECT_FALSE(takes(problem, block));
}

// Keys and values that a row does not see, beside some that others do.
TEST_F(CudaFlashDecode, HiddenNonFiniteEntriesReachNobody) {
  Random random(215);
  AttentionProblem problem = causal_half_problem({2, 4, 1204, 8, 2, 128, 128}, 1200);
  problem.mask.set_window(1100, -1);
  problem.mask.set_kv_lengths({1203, 900});
  const WholeAttention clean = random_attention(random, problem);
  const auto run_masked = [&](const WholeAttention& whole) {
    EXPECT_TRUE(takes(problem, whole.block()));
    return run_on_device(implementation(), problem, whole.block(), *device_, *stream_);
  };
  const Result before = run_masked(clean);
  for (const bool in_keys : {true, false}) {
    for (const std::set<std::int64_t>& positions :
         {std::set<std::int64_t>{0, 99, 100}, {1202, 1203}, {900}}) {
      const NonFinite entries{in_keys, kNan, positions};
      expect_confined(clean, entries, before, run_masked(with_non_finite(clean, entries)));
    }
  }
}

TEST_F(CudaFlashDecode, ContinuesAStateUnderAMask) {
  Random random(216);
  for (const std::int64_t dim : {64, 128, 256}) {
    AttentionProblem problem = causal_half_problem({3, 3, 2000, 8, 2, dim, dim}, 1997);
    problem.mask.set_kv_lengths({2000, 1200, 400});
    const WholeAttention whole = random_attention(random, problem);
    flash::decode::DecodeAttention attention(problem, *device_);
    const Result result =
        in_parts(*device_, *stream_, whole, {{0, 600}, {600, 1400}}, DType::float32,
                 [&](AttentionBlock& block, const SoftmaxState& into) {
                   ASSERT_TRUE(attention.takes(block));
                   attention.run(block, into, *stream_);
                 });
    expect_accurate(result, whole, whole.oracle());
  }
}

TEST_F(CudaFlashDecode, ExtremeSoftCaps) {
  Random random(217);
  for (const double cap : {1.2e-38, 1e-3, 300.0, 1e10, 1e30, 3e38}) {
    AttentionProblem problem = half_problem({1, 4, 1000, 8, 2, 128, 128});
    problem.soft_cap = cap;
    problem.mask.set_causal(true);
    problem.mask.set_offset(996);
    expect_masked_accurate(random_attention(random, problem));
  }
}

}  // namespace
}  // namespace annulus::test
