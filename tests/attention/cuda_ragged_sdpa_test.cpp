// cuDNN for blocks of many documents, against the oracle.
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/sequence_layout.hpp>

#include "cuda/ragged_sdpa.hpp"
#include "tests/attention/cuda_run.hpp"

namespace annulus::test {
namespace {

/// Only for run_on_device().
class RaggedSdpa final : public Implementation {
 public:
  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }
  [[nodiscard]] const Declaration& declares() const noexcept override { return declaration_; }
  [[nodiscard]] Capability accepts(const AttentionProblem& /*problem*/,
                                   Place /*place*/) const override {
    return Capability::yes();
  }
  [[nodiscard]] Capability available(Place /*place*/) const override { return Capability::yes(); }
  [[nodiscard]] double assumed_rate(const AttentionProblem& /*problem*/,
                                    Place /*place*/) const override {
    return 1e12;
  }
  [[nodiscard]] std::unique_ptr<Kernel> make_kernel(const AttentionProblem& problem,
                                                    Device& device) const override {
    return make_ragged_sdpa_kernel(problem, device);
  }

 private:
  std::vector<std::string> names_{"ragged"};
  Declaration declaration_{.results = ResultForm::rounded};
};

class CudaRaggedSdpa : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped() && cuda_devices().front().compute_capability < 90) {
      GTEST_SKIP() << "ragged batches of grouped heads need compute capability 9.0";
    }
  }

  void expect_block_accurate(const AttentionProblem& problem, const AttentionBlock& block,
                             const Sources& sources, const OracleOutput& truth) {
    SCOPED_TRACE(to_string(problem.shape) + " " + std::string(name_of(problem.dtype)) + " mask " +
                 to_string(problem.mask) + " rows " + to_string(block.rows) + " columns " +
                 to_string(block.columns));
    const WholeAttention bounds{problem, {}, {}, {}};
    const Result result = run_on_device(RaggedSdpa(), problem, block, sources, *device_, *stream_);
    expect_accurate(result, bounds, truth);
    // Rows of no document must be nothing but zeros.
    const Extents& shape = result.output.shape();
    const auto* output = result.output.view().as<float>();
    std::size_t row = 0;
    for (std::int64_t b = 0; b < shape[0]; ++b) {
      for (std::int64_t n = 0; n < shape[2]; ++n) {
        for (std::int64_t t = 0; t < shape[1]; ++t, ++row) {
          if (std::isfinite(truth.lse[row])) continue;
          const float* const values = output + ((b * shape[1] + t) * shape[2] + n) * shape[3];
          ASSERT_TRUE(std::all_of(values, values + shape[3], [](float x) { return x == 0.0F; }))
              << "batch " << b << " row " << t << " head " << n;
        }
      }
    }
  }
};

// Documents of 1 to `most` tokens, then padding.
std::vector<std::int32_t> packed_ids(Random& random, std::int64_t batch, std::int64_t length,
                                     std::int64_t most, std::int64_t padding) {
  std::vector<std::int32_t> ids;
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto end = static_cast<std::size_t>((b + 1) * length);
    for (std::int32_t id = 0; ids.size() + static_cast<std::size_t>(padding) < end; ++id) {
      const std::size_t left = end - static_cast<std::size_t>(padding) - ids.size();
      ids.insert(ids.end(), std::min(left, static_cast<std::size_t>(draw(random, 1, most))), id);
    }
    ids.resize(end, -1);
  }
  return ids;
}

TEST_F(CudaRaggedSdpa, ManyDocuments) {
  Random random(91);
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const std::int64_t dim : {64, 128}) {
      for (const auto& [heads, kv_heads] : {std::pair{4, 4}, std::pair{8, 2}}) {
        for (const std::int64_t window : {-1, 50}) {
          for (const std::int64_t batch : {1, 3}) {
            AttentionProblem problem;
            problem.shape = {batch, 1500, 1500, heads, kv_heads, dim, dim};
            problem.dtype = dtype;
            problem.mask.set_causal(true);
            problem.mask.set_window(window, -1);
            const auto ids = packed_ids(random, batch, 1500, batch == 1 ? 300 : 40, 13);
            problem.mask.set_segments(batch, ids, ids);
            const WholeAttention whole = random_attention(random, problem);
            expect_block_accurate(problem, whole.block(), {whole.query, whole.key, whole.value},
                                  whole.oracle());
          }
        }
      }
    }
  }
}

TEST_F(CudaRaggedSdpa, ShardsStoredHeadByHead) {
  Random random(92);
  AttentionProblem problem;
  problem.shape = {2, 1024, 1024, 8, 2, 128, 128};
  problem.dtype = DType::bfloat16;
  problem.mask.set_causal(true);
  const auto ids = packed_ids(random, 2, 1024, 200, 0);
  problem.mask.set_segments(2, ids, ids);
  const WholeAttention whole = random_attention(random, problem);
  for (const LayoutKind kind : {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
    const PositionRanges own = SequenceLayout(kind, 1024, 4).positions(1);
    const Tensor query = gather(whole.query.view(), own);
    const Tensor key = gather(whole.key.view(), own);
    const Tensor value = gather(whole.value.view(), own);
    const AttentionBlock block{as_bthd(query), as_bthd(key), as_bthd(value), own, own};
    expect_block_accurate(problem, block, {query, key, value}, reference_of(problem, block));
  }
}

TEST_F(CudaRaggedSdpa, RefusesRowsOfTwoPieces) {
  AttentionProblem problem;
  problem.shape = {1, 64, 64, 1, 1, 64, 64};
  problem.dtype = DType::bfloat16;
  problem.mask.set_window(3, 3);
  Random random(93);
  const WholeAttention whole = random_attention(random, problem);
  AttentionBlock block = whole.block();
  block.columns = PositionRanges({{GlobalPosition(32), 32}, {GlobalPosition(0), 32}});
  EXPECT_THROW((void)run_on_device(RaggedSdpa(), problem, block,
                                   {whole.query, whole.key, whole.value}, *device_, *stream_),
               UnsupportedError);
}

}  // namespace
}  // namespace annulus::test
