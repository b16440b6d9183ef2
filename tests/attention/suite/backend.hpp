#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/cuda.hpp>

#include "native/native.hpp"
#include "tests/attention/device_run.hpp"
#include "tests/attention/problem_of.hpp"
#include "tests/support/test_world.hpp"

/// Suites that every implementation has to pass, each at sizes that suit it. test_native runs them
/// on the CPU, test_cuda_kernels on a GPU.
namespace annulus::test {

/// Head dimensions of queries and keys, and of values.
using HeadDims = std::pair<std::int64_t, std::int64_t>;

enum class Blocks : std::uint8_t { never, also, always };

/// An implementation under test, and what it computes.
struct Backend {
  std::string name;  ///< of the implementation, and of its tests
  bool on_gpu = false;
  std::vector<DType> dtypes;
  std::vector<HeadDims> dims;          ///< one for each of its kernels
  std::int64_t rows = 0;               ///< several tiles, the last one in part
  std::int64_t columns = 0;            ///< likewise
  std::vector<AttentionShape> shapes;  ///< beside {2, rows, columns, 4, 2}
  Blocks blocks = Blocks::also;        ///< whether its problems have block masks
  std::vector<DType> confines;     ///< dtypes for which a hidden entry changes no bit of a result
  double largest_logit = 1e38;     ///< of bfloat16
  bool skips_masks = true;         ///< tests no mask in blocks whose pairs are all visible
  std::int64_t gradient_rows = 0;  ///< likewise, for gradients; 0: they have tests of their own
  std::int64_t gradient_columns = 0;
};

/// The list of this test program.
[[nodiscard]] std::vector<Backend> backends();

inline void PrintTo(const Backend& backend, std::ostream* out) {
  *out << backend.name;
}
inline std::string name_of_backend(const ::testing::TestParamInfo<Backend>& info) {
  return (info.param.on_gpu ? "cuda_" : "") + info.param.name;
}

class BackendTest : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (backend().on_gpu) {
      if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) {
        GTEST_SKIP() << reason;
      }
      device_ = make_cuda_device(0);
    } else {
      device_ = std::make_unique<HostDevice>();
    }
    stream_ = device_->make_stream("compute", kWatchdog, nullptr);
    const Capability can = implementation().available(device_->place());
    if (!can) GTEST_SKIP() << can.reason();
  }

  [[nodiscard]] static const Backend& backend() { return GetParam(); }
  [[nodiscard]] const Implementation& implementation() const {
    return registry_.get(backend().name);
  }

  /// The kernels for a problem: on a CPU, "native" multiplies matrices in one or two ways.
  [[nodiscard]] std::vector<std::unique_ptr<Kernel>> kernels(const AttentionProblem& problem) {
    std::vector<std::unique_ptr<Kernel>> all;
    all.push_back(implementation().make_kernel(problem, *device_));
    if (backend().name == "native" && !backend().on_gpu &&
        best_matrix_path(problem.dtype) != MatrixPath::sgemm) {
      all.push_back(make_native_kernel(problem, MatrixPath::sgemm, device_->memory()));
    }
    return all;
  }
  [[nodiscard]] Result run(Kernel& kernel, const AttentionBlock& block,
                           DType lse = DType::float32) {
    return result_on(*device_, *stream_, kernel, DType::float32, block, lse, nullptr, 2);
  }

  [[nodiscard]] bool hands_over_maxima() const {
    return implementation().declares().features.contains(Feature::unnormalised);
  }

  /// Gives the problem the first dtype that fits, beginning with the i-th; false if none fits.
  [[nodiscard]] bool choose_dtype(AttentionProblem& problem, std::size_t i) const {
    const std::vector<DType>& dtypes = backend().dtypes;
    for (std::size_t k = 0; k < dtypes.size(); ++k) {
      problem.dtype = dtypes[(i + k) % dtypes.size()];
      if (implementation().fits(problem, device_->place())) return true;
    }
    return false;
  }
  /// The i-th combination of kernel and dtype. Whatever a test varies by i % n meets every kernel.
  [[nodiscard]] AttentionProblem problem_of(std::size_t i, std::int64_t rows,
                                            std::int64_t columns) const {
    const std::size_t dims = backend().dims.size(), round = i / dims;
    const auto& [dim, value_dim] = backend().dims[(i + round) % dims];
    return test::problem_of({2, rows, columns, 4, 2, dim, value_dim},
                            backend().dtypes[round % backend().dtypes.size()]);
  }
  [[nodiscard]] AttentionProblem problem_of(std::size_t i) const {
    return problem_of(i, backend().rows, backend().columns);
  }
  /// Adds a block mask: to every problem of an implementation that is meant for block masks, and to
  /// half of the problems of one that also takes them.
  static void add_blocks(Random& random, AttentionProblem& problem) {
    if (backend().blocks == Blocks::never) return;
    if (backend().blocks == Blocks::also && draw(random, 0, 1) == 0) return;
    const AttentionShape& s = problem.shape;
    problem.mask.set_block_mask(
        random_block_mask(random, s.batch, s.heads, s.query_length, s.kv_length, largest_block()));
  }

  /// All columns, in ranges of ten.
  [[nodiscard]] static PositionRanges tens(std::int64_t columns) {
    std::vector<PositionRange> ranges;
    for (std::int64_t i = 0; i < columns; i += 10) ranges.push_back({GlobalPosition(i), 10});
    return PositionRanges(ranges);
  }

  /// Masks have several blocks at all sizes.
  [[nodiscard]] static std::int64_t largest_block() {
    return std::min<std::int64_t>(200, backend().columns / 2);
  }

  void expect_accurate(const WholeAttention& whole) {
    const AttentionProblem& problem = whole.problem;
    SCOPED_TRACE(describe(problem));
    problem.validate();
    ASSERT_EQ(implementation().fits(problem, device_->place()).reason(), "");
    const OracleOutput truth = whole.oracle();
    const bool with_maximum = !backend().on_gpu && hands_over_maxima();
    const AttentionShape& s = problem.shape;
    const Tensor maximum(DType::float32, {s.batch, s.heads, s.query_length}, test_memory());
    const std::vector<std::unique_ptr<Kernel>> all = kernels(problem);
    for (std::size_t k = 0; k < all.size(); ++k) {
      for (const DType lse : {DType::float32, DType::float64}) {
        SCOPED_TRACE("kernel " + std::to_string(k) + " lse " + std::string(name_of(lse)));
        std::memset(maximum.view().data(), 0xff, maximum.bytes());  // NaN
        const Result result = result_on(*device_, *stream_, *all[k], DType::float32, whole.block(),
                                        lse, with_maximum ? &maximum : nullptr, 2);
        test::expect_accurate(result, whole, truth);
        for (std::size_t row = 0; with_maximum && row < truth.maximum.size(); ++row) {
          const float got = maximum.view().as<float>()[row];
          if (got == truth.maximum[row]) continue;  // −∞ too
          ASSERT_NEAR(got, truth.maximum[row], row_bound(problem, truth.terms[row], 0).lse) << row;
        }
      }
    }
  }
  void expect_accurate(Random& random, const AttentionProblem& problem) {
    expect_accurate(random_attention(random, problem));
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  Registry registry_ = Registry::standard();
};

}  // namespace annulus::test
