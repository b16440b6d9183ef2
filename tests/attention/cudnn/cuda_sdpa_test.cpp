// cuDNN attention against the oracle, and what it refuses.
#include "tests/attention/cudnn/cuda_sdpa.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <ctime>
#include <thread>

#include <gmock/gmock.h>

#include <annulus/attention/cuda_versions.hpp>
#include <annulus/core/error.hpp>
#include <annulus/partition/sequence_layout.hpp>

namespace annulus::test {
namespace {

using ::testing::HasSubstr;

class CudaSdpa : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    const Capability can =
        sdpa().capability(half_problem({1, 8, 8, 1, 1, 64, 64}), device_->place());
    if (cuda_devices().front().compute_capability < 80) GTEST_SKIP() << can.reason();
    ASSERT_EQ(can.reason(), "") << "nothing but the GPU may be missing";
  }

  void expect_block_accurate(const AttentionProblem& problem, const AttentionBlock& block,
                             const OracleOutput& truth) {
    SCOPED_TRACE(describe(problem) + " rows " + to_string(block.rows) + " columns " +
                 to_string(block.columns));
    ASSERT_EQ(sdpa().capability(problem, device_->place()).reason(), "");
    ASSERT_EQ(sdpa().takes(problem, geometry_of(block)).reason(), "");
    const WholeAttention bounds{problem, {}, {}, {}};
    const Result result = run_on_device(sdpa(), problem, block, *device_, *stream_);
    expect_accurate(result, bounds, truth);
    expect_blind_rows_empty(result, truth);
  }

  // The LSE is compared exactly where it is infinite; outputs there must be nothing but zeros.
  static void expect_blind_rows_empty(const Result& result, const OracleOutput& truth) {
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

  void expect_whole_accurate(const WholeAttention& whole) {
    expect_block_accurate(whole.problem, whole.block(), whole.oracle());
  }

  // Rows and columns of the whole, stored head by head.
  void expect_part_accurate(const WholeAttention& whole, const PositionRanges& rows,
                            const PositionRanges& columns) {
    const Tensor query = gather(whole.query.view(), rows);
    const Tensor key = gather(whole.key.view(), columns);
    const Tensor value = gather(whole.value.view(), columns);
    const AttentionBlock block{as_bthd(query), as_bthd(key), as_bthd(value), rows, columns};
    expect_block_accurate(whole.problem, block, reference_of(whole.problem, block));
  }
};

TEST_F(CudaSdpa, FullAndCausal) {
  Random random(71);
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const std::int64_t dim : {64, 128, 256}) {
      for (const bool causal : {false, true}) {
        AttentionProblem problem = half_problem({2, 384, 384, 4, 2, dim, dim}, dtype);
        problem.mask.set_causal(causal);
        expect_whole_accurate(random_attention(random, problem));
      }
    }
  }
}

TEST_F(CudaSdpa, GroupedHeads) {
  Random random(72);
  for (const auto& [heads, kv_heads] :
       {std::pair{4, 4}, std::pair{8, 2}, std::pair{8, 1}, std::pair{1, 1}}) {
    AttentionProblem problem = causal_half_problem({1, 256, 256, heads, kv_heads, 128, 128});
    expect_whole_accurate(random_attention(random, problem));
  }
}

TEST_F(CudaSdpa, OddLengths) {
  Random random(73);
  // Among them key lengths of 64 beyond a multiple of 128, and single rows and columns.
  for (const auto& [rows, columns] :
       {std::pair{301, 517}, std::pair{517, 301}, std::pair{128, 192}, std::pair{192, 320},
        std::pair{1, 200}, std::pair{77, 1}, std::pair{3, 5}}) {
    expect_whole_accurate(random_attention(random, half_problem({2, rows, columns, 4, 2, 64, 64})));
    if (rows == 1) continue;
    AttentionProblem causal = causal_half_problem({1, rows, columns, 4, 2, 128, 128});
    expect_whole_accurate(random_attention(random, causal));
    if (rows > columns) continue;
    causal.mask.set_offset(columns - rows);  // bottom-right
    expect_whole_accurate(random_attention(random, causal));
  }
}

TEST_F(CudaSdpa, Bands) {
  Random random(74);
  int whole_blocks = 0;
  for (const auto& [left, right] : {std::pair{100, 0}, std::pair{100, 70}, std::pair{-1, 50},
                                    std::pair{0, 0}, std::pair{130, -1}, std::pair{200, 0}}) {
    for (const std::int64_t offset : {0, 40, 133}) {
      AttentionProblem problem = half_problem({1, 387, 520, 4, 2, 64, 64});
      problem.mask.set_window(left, right);
      problem.mask.set_offset(offset);
      const WholeAttention whole = random_attention(random, problem);
      const LocalRange half{LocalPosition(0), 200};
      if (sdpa().takes(problem, geometry_of(whole.block()))) {
        ++whole_blocks;
        expect_whole_accurate(whole);
      }
      expect_part_accurate(
          whole, PositionRanges({{GlobalPosition(100 - offset % 100), 200}}),
          PositionRanges({{GlobalPosition(100 + offset - offset % 100), 400}}).slice(half));
    }
  }
  EXPECT_EQ(whole_blocks, 13) << "of 18, the others see nothing somewhere";
}

TEST_F(CudaSdpa, AnotherKernelOfAKnownShapeIsReadyAtOnce) {
  Random random(88);
  AttentionProblem problem = causal_half_problem({1, 1408, 1408, 8, 2, 128, 128});
  const WholeAttention whole = random_attention(random, problem);
  const Result shape(whole.block());
  const Tensor rounded(problem.dtype, shape.output.shape(), test_memory());
  Mirrors mirrors(*device_, *stream_);
  const AttentionBlock block = upload_operands(mirrors, whole.block());
  const SoftmaxState result{mirrors.result(rounded.view()), mirrors.result(shape.lse.view())};
  const auto milliseconds_to_prepare = [&] {
    const AttentionProblem own = problem;     // as another object would have
    const std::clock_t start = std::clock();  // of this process: others may run beside it
    const std::unique_ptr<Kernel> kernel = sdpa().make_kernel(own, *device_);
    kernel->prepare(block, result);
    return static_cast<double>(std::clock() - start) * 1e3 / CLOCKS_PER_SEC;
  };
  RecordProperty("first_ms", std::to_string(milliseconds_to_prepare()));
  const double again = milliseconds_to_prepare();
  RecordProperty("again_ms", std::to_string(again));
  EXPECT_LT(again, 5.0);
}

// Threads that compute at the same time have a device each, as kernels of one device run one after
// the other.
TEST_F(CudaSdpa, ThreadsShareAPlan) {
  Random random(89);
  AttentionProblem problem = causal_half_problem({2, 384, 384, 4, 2, 64, 64});
  const WholeAttention whole = random_attention(random, problem);
  const Result expected = run_on_device(sdpa(), whole, *device_, *stream_);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const std::unique_ptr<Device> device = make_cuda_device(0);
      const std::unique_ptr<Stream> stream = device->make_stream("compute", kWatchdog, nullptr);
      for (int repeat = 0; repeat < 20; ++repeat) {
        if (!(run_on_device(sdpa(), whole, *device, *stream) == expected)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(CudaSdpa, WorksWhileAnotherDeviceIsCurrent) {
  if (cuda_devices().size() < 2) GTEST_SKIP() << "needs two GPUs";
  Random random(90);
  AttentionProblem problem = half_problem({2, 300, 300, 4, 2, 64, 64});
  problem.mask.set_kv_lengths({300, 100});
  const WholeAttention whole = random_attention(random, problem);
  const std::unique_ptr<Device> other = make_cuda_device(1);
  const std::unique_ptr<Stream> stream = other->make_stream("compute", kWatchdog, nullptr);
  check_cuda(cudaSetDevice(0), "cudaSetDevice");
  for (const Implementation* implementation : {&sdpa(), &native()}) {
    const Result result = run_on_device(*implementation, whole, *other, *stream);
    int current = -1;
    check_cuda(cudaGetDevice(&current), "cudaGetDevice");
    EXPECT_EQ(current, 0);
    expect_accurate(result, whole, whole.oracle());
  }
}

TEST_F(CudaSdpa, RanksOwnBlocksAndPrefixes) {
  Random random(75);
  AttentionProblem problem = causal_half_problem({1, 1024, 1024, 8, 2, 128, 128});
  const WholeAttention whole = random_attention(random, problem);
  for (const LayoutKind kind : {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
    const PositionRanges own = SequenceLayout(kind, 1024, 4).positions(1);
    expect_part_accurate(whole, own, own);
  }
  // The second chunk of a zigzag shard against all that it sees, gathered in pieces.
  const PositionRanges chunk({{GlobalPosition(640), 128}});
  expect_part_accurate(whole, chunk,
                       PositionRanges({{GlobalPosition(0), 256}, {GlobalPosition(256), 512}}));
  expect_part_accurate(whole, chunk, PositionRanges({{GlobalPosition(0), 1024}}));
}

TEST_F(CudaSdpa, StridedRecords) {
  // K and V of a token together, batch by batch, as they are sent; a slice of the heads and slots.
  Random random(76);
  const std::int64_t batch = 2;
  const std::int64_t slots = 300;
  const std::int64_t kv_heads = 3;
  const std::int64_t dim = 64;
  const std::int64_t record = 2 * kv_heads * dim;
  AttentionProblem problem = causal_half_problem({batch, 200, 256, 4, 2, dim, dim}, 56);
  const Tensor records = random_tensor(random, problem.dtype, {slots, batch, record});
  const Tensor query = random_tensor(random, problem.dtype, {batch, 200, 6, dim});
  const auto part = [&](std::int64_t begin) {
    return TensorView(records.view().address({0, 0, begin}), problem.dtype,
                      {batch, slots, kv_heads, dim}, {record, batch * record, dim, 1})
        .slice(1, 44, 256)
        .slice(2, 1, 2);
  };
  const AttentionBlock block{query.view().slice(2, 1, 4), part(0), part(kv_heads * dim),
                             PositionRanges::all(200), PositionRanges::all(256)};
  const OracleOutput truth =
      oracle_attention(problem, block.query, block.key, block.value, block.rows);
  expect_block_accurate(problem, block, truth);
}

TEST_F(CudaSdpa, StronglyNegativeLogits) {
  Random random(77);
  for (const std::int64_t columns : {192, 256, 320}) {
    AttentionProblem problem = half_problem({1, 256, columns, 4, 2, 64, 64});
    problem.scale = 1.0;
    WholeAttention whole = random_attention(random, problem);
    make_strongly_negative(whole);
    const OracleOutput truth = whole.oracle();
    EXPECT_LT(*std::max_element(truth.lse.begin(), truth.lse.end()), -150);
    expect_whole_accurate(whole);
  }
}

TEST_F(CudaSdpa, Padding) {
  Random random(80);
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const std::int64_t dim : {64, 128}) {
      for (const auto& [heads, kv_heads] : {std::pair{4, 4}, std::pair{8, 2}, std::pair{4, 1}}) {
        for (const bool causal : {false, true}) {
          AttentionProblem problem = half_problem({8, 384, 384, heads, kv_heads, dim, dim}, dtype);
          problem.mask.set_causal(causal);
          problem.mask.set_query_lengths({384, 0, 1, 77, 128, 200, 383, 384});
          problem.mask.set_kv_lengths({384, 384, 200, 1, 128, 301, 65, 0});
          expect_whole_accurate(random_attention(random, problem));
        }
      }
    }
  }
}

TEST_F(CudaSdpa, PaddingOfOneSide) {
  Random random(81);
  for (const auto& [rows, columns] :
       {std::pair{301, 517}, std::pair{517, 301}, std::pair{128, 192}, std::pair{3, 5}}) {
    for (const bool causal : {false, true}) {
      AttentionProblem problem = half_problem({3, rows, columns, 4, 2, 128, 128});
      problem.mask.set_causal(causal);
      problem.mask.set_kv_lengths({columns, 2, columns / 2});
      expect_whole_accurate(random_attention(random, problem));
      problem.mask.set_kv_lengths({});
      problem.mask.set_query_lengths({2, rows, rows / 2});
      expect_whole_accurate(random_attention(random, problem));
    }
  }
}

TEST_F(CudaSdpa, PaddingUnderWindows) {
  Random random(82);
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const std::int64_t dim : {64, 128}) {
      for (const auto& [left, right] : {std::pair{100, 0}, std::pair{100, 70}, std::pair{-1, 50},
                                        std::pair{0, 0}, std::pair{130, -1}}) {
        AttentionProblem problem = half_problem({6, 387, 520, 4, 2, dim, dim}, dtype);
        problem.mask.set_window(left, right);
        // Never more rows than columns.
        problem.mask.set_query_lengths({387, 0, 1, 77, 256, 300});
        problem.mask.set_kv_lengths({520, 520, 3, 99, 256, 333});
        expect_whole_accurate(random_attention(random, problem));
      }
    }
  }
}

TEST_F(CudaSdpa, PaddingUnderWindowsOverMoreRowsThanColumns) {
  Random random(83);
  for (const auto& [left, right] :
       {std::pair{100, 0}, std::pair{100, 70}, std::pair{0, 0}, std::pair{130, -1}}) {
    AttentionProblem problem = half_problem({5, 520, 387, 4, 2, 64, 64});
    problem.mask.set_window(left, right);
    // The last rows see nothing.
    problem.mask.set_query_lengths({520, 300, 520, 200, 387});
    problem.mask.set_kv_lengths({387, 250, 1, 64, 387});
    expect_whole_accurate(random_attention(random, problem));
  }
}

TEST_F(CudaSdpa, PaddingOfSingleRows) {
  Random random(84);
  for (const auto& [heads, kv_heads] : {std::pair{4, 4}, std::pair{8, 2}, std::pair{8, 1}}) {
    AttentionProblem problem = half_problem({5, 1, 700, heads, kv_heads, 128, 128});
    problem.mask.set_kv_lengths({700, 0, 1, 333, 640});
    problem.mask.set_query_lengths({1, 1, 1, 1, 0});
    expect_whole_accurate(random_attention(random, problem));
  }
}

TEST_F(CudaSdpa, PaddingBySegments) {
  Random random(85);
  AttentionProblem problem = causal_half_problem({3, 256, 256, 4, 2, 64, 64});
  std::vector<std::int32_t> ids(768, 7);
  std::fill(ids.begin() + 201, ids.begin() + 256, -1);
  std::fill(ids.begin() + 512, ids.end(), -1);
  problem.mask.set_segments(3, ids, ids);
  expect_whole_accurate(random_attention(random, problem));
}

TEST_F(CudaSdpa, PaddingOfRanksBlocks) {
  Random random(86);
  AttentionProblem problem = causal_half_problem({3, 1024, 1024, 8, 2, 128, 128});
  problem.mask.set_query_lengths({1024, 700, 200});
  problem.mask.set_kv_lengths({701, 1024, 150});
  const WholeAttention whole = random_attention(random, problem);
  for (const LayoutKind kind : {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
    const SequenceLayout layout(kind, 1024, 4);
    expect_part_accurate(whole, layout.positions(1), layout.positions(1));
  }
  const PositionRanges zigzag = SequenceLayout(LayoutKind::zigzag, 1024, 4).positions(1);
  // Without its last columns, and without its last rows.
  expect_part_accurate(whole, zigzag, zigzag.slice({LocalPosition(0), 200}));
  expect_part_accurate(whole, zigzag.slice({LocalPosition(0), 200}), zigzag);
  // The second chunk against all that it sees, gathered in pieces.
  expect_part_accurate(whole, PositionRanges({{GlobalPosition(640), 128}}),
                       PositionRanges({{GlobalPosition(0), 256}, {GlobalPosition(256), 512}}));
}

TEST_F(CudaSdpa, PaddedBlocksOfOneShapeHaveLengthsOfTheirOwn) {
  Random random(87);
  AttentionProblem problem = half_problem({4, 256, 256, 4, 2, 64, 64});
  problem.mask.set_query_lengths({256, 100, 13, 256});
  problem.mask.set_kv_lengths({77, 256, 256, 0});
  const WholeAttention whole = random_attention(random, problem);
  const std::unique_ptr<Kernel> kernel = sdpa().make_kernel(problem, *device_);
  const auto run = [&](std::int64_t first_batch) {
    AttentionBlock block = whole.block();
    block.first_batch = first_batch;
    block.query = block.query.slice(0, first_batch, 2);
    block.key = block.key.slice(0, first_batch, 2);
    block.value = block.value.slice(0, first_batch, 2);
    const OracleOutput truth = reference_of(problem, block);
    Result result = result_on(*device_, *stream_, *kernel, problem.dtype, block);
    expect_accurate(result, whole, truth);
    expect_blind_rows_empty(result, truth);
    return result;
  };
  const Result first = run(0);
  const Result second = run(2);
  const std::size_t calls = device_->memory().statistics().system_calls;
  EXPECT_TRUE(run(0) == first);
  EXPECT_TRUE(run(2) == second);
  EXPECT_EQ(device_->memory().statistics().system_calls, calls) << "allocated in a repeated call";
}

TEST_F(CudaSdpa, NoColumnsAndNoRows) {
  Random random(78);
  const WholeAttention blind = random_attention(random, half_problem({1, 6, 0, 2, 1, 64, 64}));
  expect_accurate(run_on_device(sdpa(), blind, *device_, *stream_), blind, blind.oracle());
  const WholeAttention none = random_attention(random, half_problem({1, 0, 6, 2, 1, 64, 64}));
  (void)run_on_device(sdpa(), none, *device_, *stream_);
}

TEST_F(CudaSdpa, OneKernelServesManyBlocksAndRepeatsEveryBit) {
  Random random(79);
  AttentionProblem problem = causal_half_problem({1, 512, 512, 4, 2, 64, 64});
  const WholeAttention whole = random_attention(random, problem);
  const std::unique_ptr<Kernel> kernel = sdpa().make_kernel(problem, *device_);
  const auto run = [&](std::int64_t rows) {
    AttentionBlock block = whole.block();
    block.query = block.query.slice(1, 512 - rows, rows);
    block.rows = block.rows.slice({LocalPosition(512 - rows), rows});
    return result_on(*device_, *stream_, *kernel, problem.dtype, block);
  };
  const Result small = run(128);
  const Result large = run(512);
  const std::size_t calls = device_->memory().statistics().system_calls;
  EXPECT_TRUE(run(128) == small);
  EXPECT_TRUE(run(512) == large);
  EXPECT_EQ(device_->memory().statistics().system_calls, calls) << "allocated in a repeated call";
  expect_accurate(large, whole, whole.oracle());
}

// No device needed from here on.

TEST(SdpaCapability, RefusesProblemsWithTheReason) {
  const Place place = Place::cuda(0);
  const auto reason = [&](const AttentionProblem& problem) {
    return sdpa().capability(problem, place).reason();
  };
  const AttentionShape shape{1, 8, 8, 2, 1, 64, 64};
  EXPECT_THAT(sdpa().capability(half_problem(shape), Place::host()).reason(), HasSubstr("CPU"));
  EXPECT_THAT(reason(half_problem(shape, DType::float32)), HasSubstr("float32"));
  AttentionProblem capped = half_problem(shape);
  capped.soft_cap = 30.0;
  EXPECT_THAT(reason(capped), HasSubstr("soft cap"));
  AttentionProblem negative = half_problem(shape);
  negative.scale = -1.0;
  EXPECT_THAT(reason(negative), HasSubstr("scale"));
  EXPECT_THAT(reason(half_problem({1, 8, 8, 2, 1, 60, 60})), HasSubstr("60"));
  EXPECT_THAT(reason(half_problem({1, 8, 8, 2, 1, 264, 264})), HasSubstr("264"));
  EXPECT_THAT(reason(half_problem({1, 8, 8, 2, 1, 64, 32})), HasSubstr("32"));
}

TEST(SdpaCapability, RefusesBlocksWithTheReason) {
  const auto reason = [](const Mask& mask, std::int64_t rows, std::int64_t columns) {
    const MaskedBlock one(mask, 1, rows, columns);
    return sdpa().takes(one.problem, one.block).reason();
  };
  Mask causal;
  causal.set_causal(true);
  EXPECT_EQ(reason(causal, 16, 16), "");
  EXPECT_EQ(reason(causal, 16, 8), "");
  EXPECT_THAT(reason(causal, 1, 16), HasSubstr("single row"));
  Mask early = causal;
  early.set_offset(-1);
  EXPECT_THAT(reason(early, 16, 16), HasSubstr("see nothing"));
  Mask window;
  window.set_window(3, 3);
  EXPECT_EQ(reason(window, 16, 16), "");
  EXPECT_THAT(reason(window, 16, 15), HasSubstr("more rows than columns"));
  EXPECT_THAT(reason(window, 20, 16), HasSubstr("see nothing"));
  window.set_offset(5);
  EXPECT_THAT(reason(window, 16, 40), HasSubstr("behind the first column"));
}

TEST(SdpaCapability, TakesLengthsUnlessRowsWithinSeeNothing) {
  const auto reason = [](const Mask& mask, std::int64_t rows, std::int64_t columns) {
    const MaskedBlock two(mask, 2, rows, columns);
    return sdpa().takes(two.problem, two.block).reason();
  };
  Mask mask;
  mask.set_kv_lengths({7, 0});
  mask.set_query_lengths({16, 3});
  EXPECT_EQ(reason(mask, 16, 16), "");
  mask.set_causal(true);
  EXPECT_EQ(reason(mask, 16, 16), "");
  mask.set_window(3, -1);
  EXPECT_EQ(reason(mask, 16, 16), "");
  mask.set_offset(-1);
  EXPECT_THAT(reason(mask, 16, 16), HasSubstr("see nothing"));
  Mask decode;
  decode.set_kv_lengths({7, 16});
  EXPECT_EQ(reason(decode, 1, 16), "");
  decode.set_causal(true);
  EXPECT_THAT(reason(decode, 1, 16), HasSubstr("single row"));
  Mask documents;
  std::vector<std::int32_t> ids(32, 0);
  std::fill(ids.begin() + 24, ids.end(), -1);
  documents.set_segments(2, ids, ids);
  EXPECT_EQ(reason(documents, 16, 16), "");
  std::fill(ids.begin() + 24, ids.end(), 1);
  documents.set_segments(2, ids, ids);
  EXPECT_THAT(reason(documents, 16, 16), HasSubstr("batch 1"));
}

TEST(SdpaCapability, VersionsAreKnown) {
  const CudnnVersions versions = cudnn_versions();
  EXPECT_THAT(versions.built, HasSubstr("9."));
  EXPECT_THAT(versions.loaded, HasSubstr("9."));
  EXPECT_THAT(versions.frontend, HasSubstr("1."));
}

}  // namespace
}  // namespace annulus::test
