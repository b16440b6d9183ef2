#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "cuda_implementations.hpp"
#include "flash/flash.hpp"

namespace annulus {
namespace {

constexpr std::int64_t kVectorBytes = 16;  // strides are multiples of it
constexpr std::int64_t kMostDims = 256;
constexpr std::int64_t kMostPositions = std::int64_t{1} << 28;  // see flash::KeySegment::kFar

// One kernel under two names: lists of the tiles to visit are its food, with and without blocks.
class FlashImplementation final : public Implementation {
 public:
  /// Honours `features` beside those of every flash kernel.
  FlashImplementation(std::string name, FeatureSet features, FeatureSet meant_for)
      : names_{std::move(name)},
        declaration_{.features = features,
                     .blocks = BlockForm::any,
                     .results = ResultForm::either,
                     .continues_state = true,
                     .meant_for = meant_for} {
    for (const Feature feature :
         {Feature::causal, Feature::window, Feature::segments, Feature::lengths, Feature::soft_cap,
          Feature::bias, Feature::dense_mask, Feature::dropout}) {
      declaration_.features.add(feature);
    }
  }

  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }
  [[nodiscard]] const Declaration& declares() const noexcept override { return declaration_; }

  [[nodiscard]] Capability accepts(const AttentionProblem& problem, Place place) const override {
    if (place.is_host()) {
      return Capability::no("the flash kernel runs on CUDA devices, not on the CPU");
    }
    const bool wide = problem.dtype == DType::float32;
    if (!wide && problem.dtype != DType::float16 && problem.dtype != DType::bfloat16) {
      return Capability::no("the flash kernel computes float32, float16 and bfloat16, not " +
                            std::string(name_of(problem.dtype)));
    }
    if (!wide && !problem.soft_cap && !(problem.logit_scale() > 0)) {
      return Capability::no(
          "the flash kernel of half types takes the maximum before it scales, so it needs a "
          "positive scale");
    }
    if (wide && (problem.bias || problem.dense_mask ||
                 (problem.dropout && problem.dropout->threshold() > 0))) {
      return Capability::no(
          "the flash kernel has bias, dense mask and dropout for half types, not for float32");
    }
    const AttentionShape& shape = problem.shape;
    const auto vector = kVectorBytes / static_cast<std::int64_t>(size_of(problem.dtype));
    if (shape.head_dim > kMostDims || shape.value_dim > kMostDims || shape.head_dim % vector != 0 ||
        shape.value_dim % vector != 0) {
      return Capability::no(
          fmt::format("the flash kernel needs head dimensions that are multiples of {} up to {}, "
                      "not {} with {}",
                      vector, kMostDims, shape.head_dim, shape.value_dim));
    }
    if (shape.query_length > kMostPositions || shape.kv_length > kMostPositions) {
      return Capability::no(
          fmt::format("the flash kernel takes sequences of up to {} positions", kMostPositions));
    }
    return Capability::yes();
  }

  [[nodiscard]] Capability available(Place place) const override { return flash_available(place); }

  [[nodiscard]] bool awaits_columns(const AttentionProblem& problem) const override {
    return problem.dtype != DType::float32;
  }

  // Round figures of an H200 (benchmarks/NOTES.md).
  [[nodiscard]] double assumed_rate(const AttentionProblem& problem,
                                    Place /*place*/) const override {
    if (problem.dtype == DType::float32) return 20e12;
    const std::int64_t dim = problem.shape.head_dim;
    const FeatureSet features = features_of(problem);
    if (features.contains(Feature::bias) || features.contains(Feature::dense_mask) ||
        features.contains(Feature::dropout)) {
      return dim <= 64 ? 160e12 : 320e12;
    }
    if (dim == 64) return 540e12;
    if (dim == 128 || dim == 192) return 630e12;
    return dim == 256 ? 690e12 : 400e12;
  }

  [[nodiscard]] std::unique_ptr<Kernel> make_kernel(const AttentionProblem& problem,
                                                    Device& device) const override {
    return make_flash_kernel(problem, device);
  }

 private:
  std::vector<std::string> names_;
  Declaration declaration_;
};

}  // namespace

std::unique_ptr<Implementation> make_flash_implementation() {
  return std::make_unique<FlashImplementation>("flash_attn2", FeatureSet{}, FeatureSet{});
}

std::unique_ptr<Implementation> make_blocksparse_implementation() {
  const FeatureSet blocks{Feature::block_mask};
  return std::make_unique<FlashImplementation>("blocksparse", blocks, blocks);
}

}  // namespace annulus
