// The flash kernel for few query rows, against the oracle.
#include <limits>
#include <utility>
#include <vector>

#include "flash/decode/decode_attention.hpp"
#include "flash/flash_attention.hpp"
#include "tests/attention/cuda_flash_run.hpp"
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
    return run_on_device(implementation(), whole.problem, block_of(whole),
                         {whole.query, whole.key, whole.value}, *device_, *stream_, lse);
  }
  void expect_decode_accurate(const WholeAttention& whole) {
    expect_block_accurate(whole.problem, block_of(whole), {whole.query, whole.key, whole.value},
                          whole.oracle());
  }
};

TEST_F(CudaFlashDecode, TakesFewVisibleRows) {
  Random random(200);
  const AttentionProblem problem = problem_of({1, 8, 1024, 16, 2, 64, 64});
  const WholeAttention whole = random_attention(random, problem);
  AttentionBlock block = block_of(whole);
  block.unmasked = false;
  EXPECT_FALSE(takes(problem, block));
  block.unmasked = true;
  const std::int32_t arrived = 0;
  block.arrived_from = &arrived;
  EXPECT_FALSE(takes(problem, block));
  for (const AttentionProblem& other :
       {problem_of({1, 9, 1024, 16, 2, 64, 64}), problem_of({1, 8, 1023, 16, 2, 64, 64}),
        problem_of({9, 8, 1024, 16, 2, 64, 64}),
        problem_of({1, 8, 1024, 16, 2, 64, 64}, DType::float32)}) {
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
        AttentionProblem problem = problem_of({2, rows, 1000, 16, 2, dim, value_dim}, dtype);
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
      expect_decode_accurate(random_attention(random, problem_of({1, 1, columns, 8, 1, dim, dim})));
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
          random_attention(random, problem_of({2, rows, 1111, heads, kv_heads, dim, dim})));
    }
  }
}

// More pairs of batch and head than multiprocessors: a thread block has whole pairs and parts.
TEST_F(CudaFlashDecode, ManyBatches) {
  Random random(204);
  expect_decode_accurate(random_attention(random, problem_of({37, 1, 300, 64, 8, 128, 128})));
  expect_decode_accurate(random_attention(random, problem_of({300, 2, 100, 4, 2, 64, 64})));
}

TEST_F(CudaFlashDecode, HugeAndTinyLogits) {
  Random random(205);
  for (const double scale : {1e-4, 3.0, 30.0}) {
    AttentionProblem problem = problem_of({1, 1, 3000, 8, 1, 128, 128});
    problem.scale = scale;
    const WholeAttention whole = random_attention(random, problem);
    const Error error = error_of(run(whole), problem.dtype, whole.oracle());
    EXPECT_LE(error.output, accuracy_bound(problem.dtype, 3000).output) << scale;
    EXPECT_LE(error.lse, 2e-3 * std::max(1.0, scale)) << scale;
  }
}

TEST_F(CudaFlashDecode, NonFiniteEntriesStayWhereTheyAreSeen) {
  Random random(206);
  const AttentionProblem problem = problem_of({1, 1, 1000, 16, 2, 128, 128});
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
  WholeAttention whole = random_attention(random, problem_of({1, 1, 300, 2, 1, 64, 64}));
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
      const AttentionProblem problem = problem_of({2, 3, 2000, 8, 2, dim, dim});
      const WholeAttention whole = random_attention(random, problem);
      flash::decode::DecodeAttention attention(problem, *device_);
      const Result result = run_in_parts(whole, {{500, 1500}, {0, 250}, {250, 250}}, last,
                                         [&](AttentionBlock& block, const SoftmaxState& into) {
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
  const WholeAttention whole = random_attention(random, problem_of({1, 1, 50000, 64, 8, 128, 128}));
  const Result first = run(whole);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(run(whole) == first);
}

}  // namespace
}  // namespace annulus::test
