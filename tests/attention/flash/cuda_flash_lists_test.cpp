// Work lists made by the GPU, compared bit by bit with the host's.
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "flash/flash_attention.hpp"
#include "flash/lists/device_lists.hpp"
#include "tests/attention/flash/cuda_flash_run.hpp"
#include "tests/attention/flash/flash_list_cases.hpp"
#include "tests/attention/flash/host_lists.hpp"

namespace annulus::test {
namespace {

template <class T>
std::vector<T> download(const T* from, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  check_cuda(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost),
             "download");
  return values;
}

/// Compares bit by bit.
template <class T>
testing::AssertionResult same(const std::vector<T>& made, const std::vector<T>& host) {
  if (made.size() != host.size()) {
    return testing::AssertionFailure() << made.size() << " entries, not " << host.size();
  }
  const auto words = [](const T& entry) {
    std::vector<std::int32_t> values(sizeof(T) / sizeof(std::int32_t));
    std::memcpy(values.data(), &entry, sizeof(T));
    return testing::PrintToString(values);
  };
  for (std::size_t i = 0; i < made.size(); ++i) {
    if (std::memcmp(&made[i], &host[i], sizeof(T)) != 0) {
      return testing::AssertionFailure() << "entry " << i << " of " << made.size() << " is "
                                         << words(made[i]) << ", not " << words(host[i]);
    }
  }
  return testing::AssertionSuccess();
}

class CudaFlashListsTest : public CudaFlashTest {
 protected:
  CudaFlashListsTest() : CudaFlashTest("flash_attn2") {}

  [[nodiscard]] flash::HostLists make(const ListCase& one) const {
    const flash::ListPlan plan = one.plan();
    const flash::DeviceLists lists(plan, device_->memory());
    lists.make(CudaStream::of(*stream_).raw());
    stream_->synchronize();
    return downloaded(plan, lists, one);
  }

  static flash::HostLists downloaded(const flash::ListPlan& plan, const flash::DeviceLists& lists,
                                     const ListCase& one) {
    flash::HostLists made;
    made.tiles = download(lists.tiles(), plan.tiles());
    std::int64_t segments = 0;
    for (const flash::QueryTile& tile : made.tiles) segments += tile.segments;
    EXPECT_LE(segments, plan.most_segments());
    made.segments = download(lists.segments(), std::min(segments, plan.most_segments()));
    if (plan.needs_row_keys()) {
      made.row_keys = download(lists.row_keys(), plan.batches() * one.rows.size());
    }
    if (plan.asked() == flash::Asked::ids) {
      made.row_ids = download(lists.row_ids(), plan.batches() * one.rows.size());
      made.column_ids = download(lists.column_ids(), plan.batches() * one.columns.size());
      EXPECT_THAT(download(lists.column_ids() + made.column_ids.size(), one.tile_columns),
                  testing::Each(0));
    }
    return made;
  }

  static void expect_as_on_host(const ListCase& one, const flash::HostLists& made) {
    SCOPED_TRACE(to_string(one));
    const flash::HostLists host = flash::make_lists(one.plan());
    EXPECT_TRUE(same(made.tiles, host.tiles));
    EXPECT_TRUE(same(made.segments, host.segments));
    EXPECT_TRUE(same(made.row_keys, host.row_keys));
    EXPECT_TRUE(same(made.row_ids, host.row_ids));
    EXPECT_TRUE(same(made.column_ids, host.column_ids));
  }
  void expect_as_on_host(const ListCase& one) const { expect_as_on_host(one, make(one)); }
};

// Small tiles, so that there are many.
TEST_F(CudaFlashListsTest, OfDrawnMasksAreThoseOfTheHost) {
  Random random(61);
  for (const std::vector<MaskKind>& kinds : all_combinations()) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      expect_as_on_host(random_list_case(random, kinds, 60, 8, 6));
      if (HasFailure()) return;
    }
  }
}

// Longer than 32 query tiles and key blocks.
TEST_F(CudaFlashListsTest, OfManyTilesAreThoseOfTheHost) {
  Random random(62);
  for (const std::vector<MaskKind>& kinds : all_combinations()) {
    for (int repeat = 0; repeat < 1; ++repeat) {
      expect_as_on_host(random_list_case(random, kinds, 1500, 8, 6));
      if (HasFailure()) return;
    }
  }
}

TEST_F(CudaFlashListsTest, OfEveryKernelsTilesAreThoseOfTheHost) {
  Random random(63);
  const std::vector<std::vector<MaskKind>> all = all_combinations();
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    for (const auto& [dim, value_dim] :
         {std::pair{64, 64}, std::pair{128, 128}, std::pair{192, 128}, std::pair{256, 256}}) {
      const flash::KernelInfo kernel =
          flash::find_kernel(problem_of({1, 8, 8, 1, 1, dim, value_dim}, dtype), false);
      for (int repeat = 0; repeat < 20; ++repeat) {
        const auto kinds = static_cast<std::size_t>(draw(random, 0, std::ssize(all) - 1));
        expect_as_on_host(random_list_case(random, all[kinds], draw(random, 1, 5000),
                                           kernel.tile_rows, kernel.tile_columns));
        if (HasFailure()) return;
      }
    }
  }
}

// As large as in practice: more thread blocks than run at a time.
TEST_F(CudaFlashListsTest, OfBlocksForEveryHeadAreThoseOfTheHost) {
  const PositionRanges all = PositionRanges::all(32768);
  for (const double density : {0.0, 0.06, 0.51, 1.0}) {
    ListCase one{{}, {0, 1, 0, 32}, all, all, 128, 128};
    one.mask.set_block_mask(BlockMask::random(32768, 32768, 32, density, 1));
    expect_as_on_host(one);
    one.mask.set_causal(true);
    expect_as_on_host(one);
  }
}

TEST_F(CudaFlashListsTest, AreTheSameWhenMadeAgainFromAGraph) {
  const PositionRanges all = PositionRanges::all(4096);
  ListCase one{{}, {0, 1, 0, 8}, all, all, 128, 128};
  one.mask.set_causal(true);
  one.mask.set_block_mask(BlockMask::random(4096, 4096, 8, 0.3, 2));
  const flash::ListPlan plan = one.plan();
  const flash::DeviceLists lists(plan, device_->memory());
  cudaStream_t raw = CudaStream::of(*stream_).raw();
  check_cuda(cudaStreamBeginCapture(raw, cudaStreamCaptureModeThreadLocal), "capture");
  lists.make(raw);
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(raw, &graph), "capture");
  cudaGraphExec_t exec = nullptr;
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  for (int repeat = 0; repeat < 2; ++repeat) {
    check_cuda(cudaGraphLaunch(exec, raw), "cudaGraphLaunch");
    stream_->synchronize();
    expect_as_on_host(one, downloaded(plan, lists, one));
  }
  check_cuda(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

}  // namespace
}  // namespace annulus::test
