// The backward kernels of flash attention, against formulas in float64.
#include <cmath>
#include <cstring>
#include <cuda_runtime_api.h>
#include <limits>
#include <random>
#include <vector>

#include <annulus/core/cuda_stream.hpp>

#include "flash/backward/flash_backward.hpp"
#include "tests/support/cuda_test.hpp"

namespace annulus::test {
namespace {

using flash::backward::Band;

struct Case {
  std::int64_t batches, rows, columns, heads, kv_heads, dim;
  DType dtype = DType::bfloat16;
  Band band = {};
  bool adds = false;
  bool has_grad_lse = false;
  float shift = 0;  ///< moves all logits by −shift²·scale
};

class CudaFlashBackward : public CudaTest {
 protected:
  using Values = std::vector<double>;
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    int major = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "attribute");
    if (major != 9) GTEST_SKIP() << "compute capability " << major << ", not 9";
  }

  static float rounded(float x, DType dtype) {
    if (dtype == DType::float32) return x;
    if (dtype == DType::float16) return static_cast<float>(static_cast<_Float16>(x));
    std::uint32_t bits = 0;
    std::memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    std::memcpy(&x, &bits, sizeof bits);
    return x;
  }
  Values random(std::int64_t count, DType dtype) {
    std::normal_distribution<float> normal;
    Values values(size(count));
    for (double& x : values) x = rounded(normal(engine_), dtype);
    return values;
  }
  Tensor upload(const Values& values, const Extents& shape, DType dtype) {
    const std::size_t width = size_of(dtype);
    std::vector<unsigned char> bytes(values.size() * width);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto x = static_cast<float>(values[i]);
      const auto half = static_cast<_Float16>(x);
      std::uint32_t bits = 0;
      std::memcpy(&bits, &x, sizeof bits);
      const auto upper = static_cast<std::uint16_t>(bits >> 16);
      const void* const from = dtype == DType::float32   ? static_cast<const void*>(&x)
                               : dtype == DType::float16 ? static_cast<const void*>(&half)
                                                         : &upper;
      std::memcpy(bytes.data() + i * width, from, width);
    }
    Tensor tensor(dtype, shape, device_->memory());
    check_cuda(cudaMemcpy(tensor.view().data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice),
               "upload");
    return tensor;
  }
  static Values download(const Tensor& tensor) {
    const std::size_t width = size_of(tensor.dtype());
    std::vector<unsigned char> bytes(tensor.bytes());
    check_cuda(cudaMemcpy(bytes.data(), tensor.view().data(), bytes.size(), cudaMemcpyDeviceToHost),
               "download");
    Values values(bytes.size() / width);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const unsigned char* const from = bytes.data() + i * width;
      float x = 0;
      if (tensor.dtype() == DType::float32) {
        std::memcpy(&x, from, sizeof x);
      } else if (tensor.dtype() == DType::float16) {
        _Float16 half = 0;
        std::memcpy(&half, from, sizeof half);
        x = static_cast<float>(half);
      } else {
        std::memcpy(reinterpret_cast<unsigned char*>(&x) + 2, from, 2);
      }
      values[i] = x;
    }
    return values;
  }
  // Sums of terms that cancel are judged by the magnitudes of the terms (docs/semantics.md §6).
  struct Gradient {
    explicit Gradient(std::int64_t count) : sum(size(count)), magnitude(size(count)) {}
    void add(std::int64_t at, double term, double most) {
      sum[size(at)] += term;
      magnitude[size(at)] += std::abs(most);
    }
    Values sum, magnitude;
  };
  static double error(const Values& found, const Values& before, const Gradient& truth) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < truth.sum.size(); ++i) {
      difference += std::pow(found[i] - before[i] - truth.sum[i], 2);
      norm += truth.magnitude[i] * truth.magnitude[i];
    }
    return std::sqrt(difference / norm);
  }

  void expect_accurate(const Case& c) {
    const Extents query_shape{c.batches, c.rows, c.heads, c.dim};
    const Extents key_shape{c.batches, c.columns, c.kv_heads, c.dim};
    const Extents row_shape{c.batches, c.heads, c.rows};
    const std::int64_t queries = c.batches * c.rows * c.heads * c.dim;
    const std::int64_t keys = c.batches * c.columns * c.kv_heads * c.dim;
    const std::int64_t lines = c.batches * c.heads * c.rows;
    Values q = random(queries, c.dtype), g = random(queries, c.dtype);
    Values k = random(keys, c.dtype), v = random(keys, c.dtype);
    if (c.shift != 0) {
      for (std::int64_t i = 0; i < queries; i += c.dim) q[size(i)] = -c.shift;
      for (std::int64_t i = 0; i < keys; i += c.dim) k[size(i)] = c.shift;
    }
    const Values grad_lse =
        c.has_grad_lse ? random(lines, DType::float32) : Values(size(lines), 0.0);
    const float scale = 1 / std::sqrt(static_cast<float>(c.dim));

    Values o(size(queries)), lse(size(lines));
    Gradient dq(queries), dk(keys), dv(keys);
    const auto dot = [&](const Values& x, std::int64_t at, const Values& y, std::int64_t other) {
      double sum = 0;
      for (std::int64_t d = 0; d < c.dim; ++d) sum += x[size(at + d)] * y[size(other + d)];
      return sum;
    };
    Values weight(size(c.columns));
    for (std::int64_t line = 0; line < lines; ++line) {
      const std::int64_t row = line % c.rows, head = line / c.rows % c.heads;
      const std::int64_t batch = line / c.rows / c.heads;
      const std::int64_t at = ((batch * c.rows + row) * c.heads + head) * c.dim;
      const auto key_at = [&](std::int64_t column) {
        return ((batch * c.columns + column) * c.kv_heads + head / (c.heads / c.kv_heads)) * c.dim;
      };
      double sum = 0, high = -std::numeric_limits<double>::infinity();
      for (std::int64_t j = 0; j < c.columns; ++j) {
        const std::int64_t distance = c.band.columns.start + c.band.columns.stride * j -
                                      c.band.rows.start - c.band.rows.stride * row;
        const bool seen =
            (!c.band.low || distance >= *c.band.low) && (!c.band.high || distance <= *c.band.high);
        weight[size(j)] =
            seen ? scale * dot(q, at, k, key_at(j)) : -std::numeric_limits<double>::infinity();
        high = std::max(high, weight[size(j)]);
      }
      const bool sees = std::isfinite(high);
      for (double& w : weight) sum += w = sees ? std::exp(w - high) : 0;
      lse[size(line)] = sees ? high + std::log(sum) : high;
      if (!sees) continue;
      for (std::int64_t j = 0; j < c.columns; ++j) {
        weight[size(j)] /= sum;
        for (std::int64_t d = 0; d < c.dim; ++d) {
          o[size(at + d)] += weight[size(j)] * v[size(key_at(j) + d)];
        }
      }
      const double delta = dot(o, at, g, at) - grad_lse[size(line)];
      for (std::int64_t j = 0; j < c.columns; ++j) {
        const double w = weight[size(j)];
        if (w == 0) continue;
        const double product = dot(g, at, v, key_at(j));
        const double grad = scale * w * (product - delta);
        const double most = scale * w * (std::abs(product) + std::abs(delta));
        for (std::int64_t d = 0; d < c.dim; ++d) {
          const double key = k[size(key_at(j) + d)], query = q[size(at + d)];
          dq.add(at + d, grad * key, most * key);
          dk.add(key_at(j) + d, grad * query, most * query);
          dv.add(key_at(j) + d, w * g[size(at + d)], w * g[size(at + d)]);
        }
      }
    }
    for (double& x : o) x = rounded(static_cast<float>(x), c.dtype);

    const DType result_type = c.adds ? DType::float32 : c.dtype;
    const double kNan = std::numeric_limits<double>::quiet_NaN();
    const auto before = [&](std::int64_t count) {
      return c.adds ? random(count, DType::float32) : Values(size(count), kNan);
    };
    const Values first[] = {before(queries), before(keys), before(keys)};
    const Tensor query = upload(q, query_shape, c.dtype), key = upload(k, key_shape, c.dtype);
    const Tensor value = upload(v, key_shape, c.dtype), output = upload(o, query_shape, c.dtype);
    const Tensor grad = upload(g, query_shape, c.dtype);
    const Tensor log_sums = upload(lse, row_shape, DType::float32);
    const Tensor log_grads = upload(grad_lse, row_shape, DType::float32);
    const Tensor found[] = {upload(first[0], query_shape, result_type),
                            upload(first[1], key_shape, result_type),
                            upload(first[2], key_shape, result_type)};
    flash::backward::BackwardInputs inputs{
        query.view(), key.view(), value.view(), output.view(), grad.view(), log_sums.view(), {}};
    if (c.has_grad_lse) inputs.grad_lse = log_grads.view();
    flash::backward::FlashBackward backward(*device_);
    backward.run(inputs, c.band, scale, {found[0].view(), found[1].view(), found[2].view(), c.adds},
                 *stream_);
    check_cuda(cudaDeviceSynchronize(), "backward");

    const double bound = c.dtype == DType::float16 ? 2e-3 : 1.2e-2;
    const Values zeros(size(std::max(queries, keys)), 0.0);
    const Gradient* const truths[] = {&dq, &dk, &dv};
    const char* const names[] = {"dQ", "dK", "dV"};
    for (int i = 0; i < 3; ++i) {
      EXPECT_LT(error(download(found[i]), c.adds ? first[i] : zeros, *truths[i]), bound)
          << names[i] << " of " << name_of(c.dtype) << " query " << to_string(query_shape)
          << " key " << to_string(key_shape);
    }
  }
  void expect_all_accurate(Case c) {
    for (const std::int64_t dim : {64, 128}) {
      for (const DType dtype : {DType::bfloat16, DType::float16}) {
        c.dim = dim;
        c.dtype = dtype;
        expect_accurate(c);
      }
    }
  }

  std::mt19937 engine_{24};
};

Band causal() {
  return {{}, {}, {}, 0};
}

TEST_F(CudaFlashBackward, Full) {
  expect_all_accurate({2, 256, 128, 2, 2, 0});
}
TEST_F(CudaFlashBackward, CausalGroupedHeads) {
  expect_all_accurate({2, 200, 200, 8, 1, 0, DType::bfloat16, causal()});
}
TEST_F(CudaFlashBackward, OddLengths) {
  expect_all_accurate({1, 133, 221, 4, 2, 0, DType::bfloat16, {{}, {}, {}, 88}});
  expect_all_accurate({1, 1, 130, 4, 2, 0});
}
TEST_F(CudaFlashBackward, OffsetsStridesAndWindow) {
  expect_all_accurate({1, 150, 217, 2, 2, 0, DType::bfloat16, {{1000, 1}, {900, 1}, {}, 0}});
  expect_all_accurate({1, 130, 150, 2, 2, 0, DType::bfloat16, {{3, 4}, {1, 2}, {}, 0}});
  expect_all_accurate({1, 300, 300, 2, 2, 0, DType::bfloat16, {{}, {}, -100, 7}});
}
TEST_F(CudaFlashBackward, RowsThatSeeNothing) {
  expect_all_accurate({1, 300, 300, 2, 1, 0, DType::bfloat16, {{}, {150, 1}, {}, 0}});
}
TEST_F(CudaFlashBackward, StronglyNegativeLse) {
  expect_accurate({1, 100, 200, 2, 1, 128, DType::bfloat16, {}, false, false, 36});
  expect_accurate({1, 100, 200, 2, 1, 128, DType::float16, {}, false, false, 36});
}
TEST_F(CudaFlashBackward, GradientOfLse) {
  expect_all_accurate({1, 100, 150, 2, 1, 0, DType::bfloat16, causal(), false, true});
}
TEST_F(CudaFlashBackward, AddsToFloat32) {
  expect_all_accurate({2, 150, 150, 4, 2, 0, DType::bfloat16, causal(), true});
}

}  // namespace
}  // namespace annulus::test
