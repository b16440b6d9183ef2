// Gradients of flash attention on the device under masks that are not one straight band.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "tests/attention/flash/cuda_flash_backward.hpp"
#include "tests/attention/gradient_cases.hpp"
#include "tests/attention/random_mask.hpp"

namespace annulus::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST_F(CudaFlashBackward, EveryMask) {
  Random random(31);
  unsigned i = 0;
  for (const std::vector<MaskKind>& kinds : all_combinations()) {
    const Dims& dims = kAllDims[i % std::size(kAllDims)];
    AttentionProblem problem = problem_of({2, 150, 210, 2, 1, dims.head, dims.value}, dims.dtype);
    if (i % 7 < 3 && dims.dtype == DType::bfloat16) problem.dtype = DType::float16;
    if (i % 5 == 0) problem.soft_cap = 3.0;
    repeats_bits_ = i / std::size(kAllDims) % 2 == 0;
    problem.mask = random_mask(random, kinds, 2, 150, 210);
    expect_accurate(random, problem);
    ++i;
  }
}

TEST_F(CudaFlashBackward, ManyDocuments) {
  Random random(32);
  AttentionProblem problem = half_problem({2, 900, 900, 2, 1, 0, 0});
  std::vector<std::int32_t> ends{0};
  while (ends.back() < 900) {
    ends.push_back(std::min(900, ends.back() + static_cast<std::int32_t>(draw(random, 1, 200))));
  }
  std::vector<std::int32_t> ids = segments_from_cu_seqlens(ends, 900);
  const std::vector<std::int32_t> others(900, 1);
  ids.insert(ids.end(), others.begin(), others.end());
  problem.mask.set_segments(2, ids, ids);
  problem.mask.set_causal(true);
  expect_all_accurate(random, problem);
  repeats_bits_ = true;
  expect_all_accurate(random, problem);
}

// Blocks with much more work than others begin first.
TEST_F(CudaFlashBackward, KeyTilesThatMoreRowsSeeThanOthers) {
  Random random(34);
  AttentionProblem problem = causal_half_problem({1, 1200, 1200, 2, 1, 0, 0});
  problem.mask.set_window(100, -1);
  problem.mask.set_sink_tokens(8);
  expect_all_accurate(random, problem);
}

TEST_F(CudaFlashBackward, BlockMasks) {
  Random random(33);
  name_ = "blocksparse";
  for (const BlockSize size : {BlockSize{128, 128}, BlockSize{64, 192}, BlockSize{48, 40}}) {
    for (const bool repeats : {false, true}) {
      repeats_bits_ = repeats;
      for (const Dims& dims : kAllDims) {
        AttentionProblem problem =
            problem_of({2, 500, 600, 4, 2, dims.head, dims.value}, dims.dtype);
        problem.mask.set_block_mask(BlockMask::random(500, 600, 4, 0.4, 5, size));
        if (dims.head % 128 == 0) {
          problem.mask.set_causal(true);
          problem.mask.set_offset(100);
        }
        expect_accurate(random, problem);
      }
    }
  }
}

// Lists of heads and of batches, and float16, with more blocks than run at a time.
TEST_F(CudaFlashBackward, ListsOfHeadsAndBatchesRepeatBits) {
  Random random(36);
  name_ = "blocksparse";
  for (const auto& [dtype, dim] : {std::pair{DType::bfloat16, 128}, {DType::float16, 64}}) {
    AttentionProblem problem = problem_of({2, 300, 1500, 16, 8, dim, dim}, dtype);
    problem.mask.set_block_mask(BlockMask::random(300, 1500, 16, 0.4, 5, BlockSize{64, 128}));
    expect_same_bits(random, problem);
    problem.mask = Mask();
    std::vector<std::int32_t> queries(600), keys(3000);
    for (std::int32_t i = 0; i < 300; ++i) {
      queries[i] = i / 40;
      queries[300 + i] = i / 120;
    }
    for (std::int32_t i = 0; i < 1500; ++i) {
      keys[i] = i / 200;
      keys[1500 + i] = i / 600;
    }
    problem.mask.set_segments(2, queries, keys);
    expect_same_bits(random, problem);
  }
}

TEST_F(CudaFlashBackward, RowsAndColumnsOfSeveralRanges) {
  Random random(34);
  const PositionRanges rows({PositionRange{GlobalPosition(0), 90},
                             PositionRange{GlobalPosition(310), 90},
                             PositionRange{GlobalPosition(91), 70, 3}});
  const PositionRanges columns(
      {PositionRange{GlobalPosition(210), 190}, PositionRange{GlobalPosition(1), 100, 2}});
  for (const Dims& dims : kAllDims) {
    AttentionProblem problem =
        causal_problem_of({1, 400, 400, 2, 1, dims.head, dims.value}, dims.dtype);
    problem.mask.set_window(250, -1);
    const WholeGradients whole(random, problem);
    const BackwardBlock all = whole.block();
    const Tensor query = gather(all.query, rows), grad_output = gather(all.grad_output, rows);
    const Tensor key = gather(all.key, columns), value = gather(all.value, columns);
    const Extents of_rows{1, 2, rows.size()};
    const Tensor lse(DType::float32, of_rows, test_memory());
    const Tensor delta(DType::float32, of_rows, test_memory());
    for (std::int64_t n = 0; n < 2; ++n) {
      for (std::int64_t r = 0; r < rows.size(); ++r) {
        const std::int64_t position = rows.global(LocalPosition(r)).value();
        lse.view().at<float>({0, n, r}) = all.lse.at<float>({0, n, position});
        delta.view().at<float>({0, n, r}) = all.delta.at<float>({0, n, position});
      }
    }
    const BackwardBlock block{as_bthd(query), as_bthd(key), as_bthd(value), as_bthd(grad_output),
                              lse.view(),     delta.view(), rows,           columns};
    const Tensor found[] = {zeros(DType::float32, query.shape()),
                            zeros(DType::float32, key.shape()),
                            zeros(DType::float32, value.shape())};
    const Tensor expected[] = {zeros(DType::float32, query.shape()),
                               zeros(DType::float32, key.shape()),
                               zeros(DType::float32, value.shape())};
    const auto gradients_in = [](const Tensor(&to)[3]) {
      return Gradients{as_bthd(to[0]), as_bthd(to[1]), as_bthd(to[2])};
    };
    add_block(problem, block, gradients_in(found));
    whole.add(registry_.get("vanilla"), block, gradients_in(expected));
    for (int i = 0; i < 3; ++i) {
      double difference = 0, magnitude = 0;
      for (std::size_t j = 0; j < static_cast<std::size_t>(found[i].shape().product()); ++j) {
        difference += std::pow(entry(found[i], j) - entry(expected[i], j), 2);
        magnitude += std::pow(entry(expected[i], j), 2);
      }
      EXPECT_GT(magnitude, 0);
      const double bound = dims.dtype == DType::float32 ? 1e-5 : 8e-3;
      EXPECT_LT(std::sqrt(difference), bound * std::sqrt(magnitude)) << i;
    }
  }
}

TEST_F(CudaFlashBackward, HiddenValuesReachNothingInOtherDocuments) {
  Random random(35);
  const std::vector<std::int32_t> ids =
      segments_from_cu_seqlens(std::vector<std::int32_t>{0, 90, 230, 300, 500}, 500);
  for (const Dims& dims : {Dims{64, 64}, {192, 128}, {256, 256}, {64, 64, DType::float32}}) {
    AttentionProblem problem = problem_of({1, 500, 500, 2, 1, dims.head, dims.value}, dims.dtype);
    problem.mask.set_segments(1, ids, ids);
    WholeAttention forward = random_operands(random, problem);
    fill(forward.key, 100, kNan);
    fill(forward.value, 310, kNan);
    fill(forward.query, 400, kNan);
    const WholeGradients whole(random, std::move(forward));
    add(whole);
    expect_same_reach(whole);
  }
}

}  // namespace
}  // namespace annulus::test
