#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "cuda/h200_rates.hpp"
#include "cuda_implementations.hpp"
#include "flash/few_rows.hpp"
#include "flash/flash.hpp"
#include "flash/has_modifiers.hpp"

namespace annulus {
namespace {

constexpr std::int64_t kVectorBytes = 16;  // strides are multiples of it
constexpr std::int64_t kMaximumDims = 256;
// The largest head dimension for which a backward kernel adds each key tile's part of dQ to memory,
// and for which there is one of float32.
constexpr std::int64_t kMaximumNarrowDims = 128;
// Tiles of both passes, and of the forward pass for small value dimensions (see flash/shape.cuh).
constexpr std::int64_t kTile = 128;
constexpr std::int64_t kTallTile = 192;
constexpr std::int64_t kTallValueDim = 64;
constexpr std::int64_t kMaximumPositions = std::int64_t{1} << 28;  // see flash::KeySegment::kFar

// The rates of the general class at 192 and 256, and of float32 at 256, were not measured.
constexpr std::array kHalfRates{
    H200Rates{64, 64, kInLongRuns * 577e12, kInLongRuns * 548e12, 160e12},
    H200Rates{128, 128, kInLongRuns * 728e12, kInLongRuns * 722e12, 300e12},
    H200Rates{192, 128, kInLongRuns * 742e12, kInLongRuns * 702e12, 300e12},
    H200Rates{256, 256, kInLongRuns * 788e12, kInLongRuns * 753e12, 300e12}};
// Rates of long walks in long runs (benchmarks/NOTES.md, "Predicted backward passes", "Wide heads
// by five products" and "A class for dropout alone"). The general rates are means of dropout,
// biases without their gradients and dense masks.
constexpr std::array kBackwardRates{
    H200Rates{64, 64, 510e12, 510e12, 250e12}, H200Rates{128, 128, 565e12, 565e12, 375e12},
    H200Rates{192, 128, 495e12, 480e12, 275e12}, H200Rates{256, 256, 500e12, 485e12, 340e12}};
constexpr std::array kFloat32Rates{H200Rates{64, 64, 38e12, 38e12},
                                   H200Rates{128, 128, 41e12, 41e12},
                                   H200Rates{256, 256, 41e12, 41e12}};
constexpr std::array kFloat32BackwardRates{H200Rates{64, 64, 27e12, 27e12},
                                           H200Rates{128, 128, 27e12, 27e12}};

constexpr const char* kFlash = "flash_attn2";

// Tiles are fixed, so the bits of a row depend on its keys alone, and the bits of a key's gradients
// on its rows. Where documents or blocks cut the sequence, tiles begin elsewhere. Modifiers of the
// general class have not been examined.
Capability keeps_global_order(const AttentionProblem& problem) {
  const Mask& mask = problem.mask;
  if (problem.dtype == DType::float32 || flash::has_modifiers(problem) || mask.has_segments() ||
      mask.has_packings() || mask.block_mask()) {
    return Capability::no(
        "reproducible world: the flash kernel has the same bits on any number of ranks for half "
        "types only, without documents, block mask, bias, dense mask and dropout");
  }
  return Capability::yes();
}

bool are_whole_tiles(const PositionRanges& rows, std::int64_t length, std::int64_t tile) {
  return std::ranges::all_of(rows.ranges(), [&](const PositionRange& range) {
    const std::int64_t end = range.last().value() + 1;
    return range.start.value() % tile == 0 && (end % tile == 0 || end == length);
  });
}

// One kernel under two names: lists of the tiles to visit are its food, with and without blocks.
class FlashImplementation final : public Implementation {
 public:
  /// Honours `features` beside the features of every flash kernel.
  FlashImplementation(std::string name, FeatureSet features, FeatureSet meant_for,
                      std::optional<BackwardDeclaration> backward)
      : names_{std::move(name)},
        declaration_{.features = features,
                     .blocks = BlockForm::any,
                     .results = ResultForm::either,
                     .continues_state = true,
                     .meant_for = meant_for,
                     .row_tile = kTile,
                     .backward = backward,
                     .reproducible_rows = kTile} {
    declaration_.features = features | FeatureSet::positions() | FeatureSet::call_arguments() |
                            FeatureSet{Feature::segments, Feature::lengths,    Feature::soft_cap,
                                       Feature::bias,     Feature::dense_mask, Feature::dropout};
  }

  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }
  [[nodiscard]] const Declaration& declares() const noexcept override { return declaration_; }
  [[nodiscard]] const std::string& kernel_name() const noexcept override { return kernel_name_; }

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
    if (wide && flash::has_modifiers(problem)) {
      return Capability::no(
          "the flash kernel supports bias, dense mask and dropout for half types, not for float32");
    }
    const AttentionShape& shape = problem.shape;
    const auto vector = kVectorBytes / static_cast<std::int64_t>(size_of(problem.dtype));
    if (shape.head_dim > kMaximumDims || shape.value_dim > kMaximumDims ||
        shape.head_dim % vector != 0 || shape.value_dim % vector != 0) {
      return Capability::no(
          fmt::format("the flash kernel needs head dimensions that are multiples of {} up to {}, "
                      "not {} with {}",
                      vector, kMaximumDims, shape.head_dim, shape.value_dim));
    }
    if (shape.query_length > kMaximumPositions || shape.kv_length > kMaximumPositions) {
      return Capability::no(
          fmt::format("the flash kernel takes sequences of up to {} positions", kMaximumPositions));
    }
    return problem.in_global_order() ? keeps_global_order(problem) : Capability::yes();
  }

  [[nodiscard]] Capability takes(const AttentionProblem& problem,
                                 const BlockGeometry& block) const override {
    if (problem.in_global_order() && problem.shape.value_dim <= kTallValueDim &&
        !are_whole_tiles(block.rows, problem.shape.query_length, kTallTile)) {
      return Capability::no(fmt::format(
          "reproducible world: the flash kernel's tiles for value dimensions of up to {} have {} "
          "rows, and rows {} are cut elsewhere",
          kTallValueDim, kTallTile, to_string(block.rows)));
    }
    return Capability::yes();
  }

  [[nodiscard]] Capability accepts_backward(const AttentionProblem& problem,
                                            Place place) const override {
    const bool wide =
        std::max(problem.shape.head_dim, problem.shape.value_dim) > kMaximumNarrowDims;
    if (wide && problem.dtype == DType::float32) {
      return Capability::no(
          fmt::format("the flash kernel computes float32 gradients for head dimensions up to {}, "
                      "not {} with {}",
                      kMaximumNarrowDims, problem.shape.head_dim, problem.shape.value_dim));
    }
    if (wide && problem.in_global_order()) {
      return Capability::no(
          fmt::format("reproducible world: for head dimensions above {}, the flash kernel sums "
                      "the dQ of each block separately",
                      kMaximumNarrowDims));
    }
    if (problem.in_global_order() && problem.sinks) {
      return Capability::no(
          "reproducible world: on GPUs, the gradient of the sinks is rounded while it is added up");
    }
    if (problem.in_global_order() && problem.dtype == DType::float16) {
      return Capability::no(
          "reproducible world: the flash kernel scales float16 gradients by the largest of a "
          "rank's rows");
    }
    if (problem.soft_cap && problem.bias) {
      return Capability::no("the flash kernel has no backward pass for a bias beside a soft cap");
    }
    return accepts(problem, place);
  }

  // The backward kernels take any block. takes() is about forward tiles.
  [[nodiscard]] Capability takes_backward(const AttentionProblem& /*problem*/,
                                          const BlockGeometry& /*block*/) const override {
    return Capability::yes();
  }

  [[nodiscard]] Capability available(Place place) const override { return flash_available(place); }

  [[nodiscard]] bool awaits_columns(const AttentionProblem& problem) const override {
    return problem.dtype != DType::float32 && !problem.in_global_order();
  }

  [[nodiscard]] FewRows few_rows(const AttentionProblem& problem) const override {
    return flash::few_rows(problem);
  }

  [[nodiscard]] double assumed_rate(const ProblemClass& problem, Place /*place*/) const override {
    const bool backward = problem.pass == Pass::backward;
    if (problem.dtype == DType::float32) {
      return backward ? h200_rate(kFloat32BackwardRates, problem)
                      : h200_rate(kFloat32Rates, problem);
    }
    return h200_rate(backward ? kBackwardRates : kHalfRates, problem);
  }

  [[nodiscard]] std::unique_ptr<Kernel> make_kernel(const AttentionProblem& problem,
                                                    Device& device) const override {
    return make_flash_kernel(problem, device);
  }

 private:
  std::vector<std::string> names_;
  std::string kernel_name_{kFlash};
  Declaration declaration_;
};

BackwardDeclaration backward_declaration(const FeatureSet& more) {
  return {
      .features = FeatureSet::positions() |
                  FeatureSet{Feature::segments, Feature::lengths, Feature::soft_cap, Feature::bias,
                             Feature::dense_mask, Feature::dropout, Feature::varying_seed} |
                  more,
      .sums_bias_over_keys = false,
      .repeats_bias_sums = false,
      .joins_query_heads = true,
      .reproducible_columns = kTile};
}

}  // namespace

std::unique_ptr<Implementation> make_flash_implementation() {
  return std::make_unique<FlashImplementation>(kFlash, FeatureSet{}, FeatureSet{},
                                               backward_declaration({}));
}

std::unique_ptr<Implementation> make_blocksparse_implementation() {
  const FeatureSet blocks{Feature::block_mask};
  return std::make_unique<FlashImplementation>("blocksparse", blocks, blocks,
                                               backward_declaration(blocks));
}

}  // namespace annulus
