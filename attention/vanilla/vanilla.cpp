#include "vanilla/vanilla.hpp"

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/attention_weights.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/parallel.hpp>

#include "vanilla/dense_gradients.hpp"
#include "vanilla/dense_head.hpp"

namespace annulus {
namespace {

using vanilla::DenseHead;

// The matrices of one head of a block may take this much memory, per thread.
constexpr std::int64_t kMaximumHeadBytes = std::int64_t{1} << 30;
// Attention weights are computed some rows at a time: as many as fit into this, per thread.
constexpr std::int64_t kBandBytes = std::int64_t{8} << 20;

template <class Real>
void store(const DenseHead<Real>& dense, const SoftmaxState& result, std::int64_t batch,
           std::int64_t head) {
  const auto output = dense.output();
  for (std::int64_t i = 0; i < output.rows; ++i) {
    void* row = result.output.address({batch, i, head});
    const auto write = [&](auto* to) {
      for (const Real value : output.row(i))
        *to++ = static_cast<std::decay_t<decltype(*to)>>(value);
    };
    if (result.output.dtype() == DType::float64) {
      write(static_cast<double*>(row));
    } else {
      write(static_cast<float*>(row));
    }
    result.set_lse_at(batch, head, i, dense.lse(i));
    if (result.wants_maximum()) {
      result.maximum.at<float>({batch, head, i}) = static_cast<float>(dense.maximum(i));
    }
  }
}

// Calls body(batch, head) for every batch and query head of a block.
template <class Body>
void for_each_head(const AttentionBlock& block, int threads, const Body& body) {
  const std::int64_t heads = block.query.size(2);
  parallel_for(block.query.size(0) * heads, std::max(1, threads),
               [&](std::int64_t task, int /*worker*/) { body(task / heads, task % heads); });
}

template <class Real>
class VanillaKernel final : public Kernel {
 public:
  explicit VanillaKernel(const AttentionProblem& problem) : problem_(problem) {}

  void forward(const AttentionBlock& block, const SoftmaxState& result,
               const ExecutionContext& context) override {
    context.stream.synchronize();  // the stream's earlier work comes first
    for_each_head(block, context.threads, [&](std::int64_t batch, std::int64_t head) {
      DenseHead<Real> dense(problem_, block, batch, head);
      dense.make_logits();
      dense.apply_softmax();  // the plan adds the sinks
      dense.apply_dropout();
      store(dense, result, batch, head);
    });
  }

  void backward(const BackwardBlock& block, const Gradients& gradients,
                const ExecutionContext& context) override {
    context.stream.synchronize();  // the stream's earlier work comes first
    const std::int64_t kv_heads = block.key.size(2);
    // Batches and heads may share entries of a bias.
    const int threads = gradients.bias.shape().rank() > 0 ? 1 : std::max(1, context.threads);
    parallel_for(block.query.size(0) * kv_heads, threads, [&](std::int64_t task, int /*worker*/) {
      vanilla::add_gradients<Real>(problem_, block, gradients, task / kv_heads, task % kv_heads);
    });
  }

 private:
  const AttentionProblem& problem_;
};

class VanillaImplementation final : public Implementation {
 public:
  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }
  [[nodiscard]] const Declaration& declares() const noexcept override { return declaration_; }

  [[nodiscard]] Capability accepts(const AttentionProblem& problem, Place place) const override {
    if (!place.is_host()) return Capability::no("computes on CPUs only");
    return is_floating(problem.dtype)
               ? Capability::yes()
               : Capability::no("does not compute " + std::string(name_of(problem.dtype)));
  }

  [[nodiscard]] Capability available(Place /*place*/) const override { return Capability::yes(); }

  [[nodiscard]] Capability takes(const AttentionProblem& problem,
                                 const BlockGeometry& block) const override {
    const double bytes =
        vanilla::bytes_of_head(weights_dtype(problem), block.rows.size(), block.columns.size(),
                               problem.shape.head_dim, problem.shape.value_dim);
    if (bytes <= kMaximumHeadBytes) return Capability::yes();
    return Capability::no(
        fmt::format("logits and operands of {} queries and {} keys take more than {} MiB per head",
                    block.rows.size(), block.columns.size(), kMaximumHeadBytes >> 20U));
  }

  // A CPU core of a busy machine did 0.9e9 to 1.2e9, float32, D = 64 and 128 (benchmarks/NOTES.md).
  [[nodiscard]] double assumed_rate(const ProblemClass& /*problem*/,
                                    Place /*place*/) const override {
    return 1e9;
  }

  [[nodiscard]] std::unique_ptr<Kernel> make_kernel(const AttentionProblem& problem,
                                                    Device& /*device*/) const override {
    if (weights_dtype(problem) == DType::float64) {
      return std::make_unique<VanillaKernel<double>>(problem);
    }
    return std::make_unique<VanillaKernel<float>>(problem);
  }

 private:
  std::vector<std::string> names_{"vanilla"};
  Declaration declaration_{
      .features = FeatureSet::all() | FeatureSet::call_arguments() |
                  FeatureSet{Feature::float64, Feature::weights},
      .meant_for = {Feature::float64, Feature::weights},
      .backward = BackwardDeclaration{
          .features = FeatureSet::positions() | FeatureSet::call_arguments() |
                      FeatureSet{Feature::segments, Feature::lengths, Feature::block_mask,
                                 Feature::soft_cap, Feature::dropout, Feature::bias,
                                 Feature::dense_mask, Feature::float64}}};
};

// Some rows of a block.
AttentionBlock rows_of(const AttentionBlock& block, std::int64_t begin, std::int64_t count) {
  AttentionBlock rows = block;
  rows.query = block.query.slice(1, begin, count);
  rows.rows = block.rows.slice({LocalPosition(begin), count});
  rows.scores = block.scores.slice(2, begin, count);
  return rows;
}

template <class Real>
void compute_weights(const AttentionProblem& problem, const AttentionBlock& block,
                     const TensorView& weights, int threads) {
  const std::int64_t row_bytes =
      std::max<std::int64_t>(1, block.columns.size()) * static_cast<std::int64_t>(sizeof(Real));
  const std::int64_t band = std::max<std::int64_t>(1, kBandBytes / row_bytes);
  for (std::int64_t begin = 0; begin < block.rows.size(); begin += band) {
    const AttentionBlock rows = rows_of(block, begin, std::min(band, block.rows.size() - begin));
    for_each_head(rows, threads, [&](std::int64_t batch, std::int64_t head) {
      DenseHead<Real> dense(problem, rows, batch, head);
      dense.make_logits();
      dense.apply_softmax(problem.sinks ? problem.sinks->of_head(block.first_head + head)
                                        : std::span<const float>());
      dense.apply_dropout();
      for (std::int64_t i = 0; i < dense.weights().rows; ++i) {
        const auto row = dense.weights().row(i);
        std::copy(row.begin(), row.end(),
                  static_cast<Real*>(weights.address({batch, head, begin + i})));
      }
    });
  }
}

}  // namespace

std::unique_ptr<Implementation> make_vanilla_implementation() {
  return std::make_unique<VanillaImplementation>();
}

DType weights_dtype(const AttentionProblem& problem) noexcept {
  const bool wide = problem.dtype == DType::float64 || problem.softmax_dtype == DType::float64;
  return wide ? DType::float64 : DType::float32;
}

void attention_weights(const AttentionProblem& problem, const AttentionBlock& block,
                       const TensorView& weights, int threads) {
  const Extents shape{block.query.size(0), block.query.size(2), block.rows.size(),
                      block.columns.size()};
  if (!(weights.shape() == shape)) {
    throw ArgumentError("attention weights", "shape " + to_string(weights.shape()),
                        to_string(shape));
  }
  const DType dtype = weights_dtype(problem);
  if (weights.dtype() != dtype) {
    throw ArgumentError("attention weights", std::string(name_of(weights.dtype())),
                        std::string(name_of(dtype)) + ", in which the softmax is computed");
  }
  if (dtype == DType::float64) {
    compute_weights<double>(problem, block, weights, threads);
  } else {
    compute_weights<float>(problem, block, weights, threads);
  }
}

}  // namespace annulus
