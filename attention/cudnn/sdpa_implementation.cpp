#include <array>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cuda/h200_rates.hpp"
#include "cuda_implementations.hpp"
#include "cudnn/sdpa.hpp"

namespace annulus {
namespace {

// Why cuDNN cannot take this band over `rows` × `columns`; empty if it can. If batches have lengths
// of their own, these lengths ensure that the band's left side leaves no row without a column.
std::string mask_obstacle(const LocalMask& mask, std::int64_t rows, std::int64_t columns) {
  const Band& band = mask.band;
  if (!band.limited()) return {};
  if (rows == 1) return "a mask over a single row, which cuDNN gets wrong with grouped heads";
  const bool left = is_limited(band.low);
  const bool right = is_limited(band.high);
  if ((right && band.high < 0) || (left && !mask.padded() && band.low > columns - rows) ||
      band.low > band.high) {
    return "some rows see nothing, for which cuDNN gives NaN";
  }
  if (left && band.low > 0) return "the window begins behind the first column for every row";
  if (left && !mask.padded() && rows > columns) return "a window over more rows than columns";
  return {};
}

// On Hopper, cuDNN 9.19 gives NaN in dQ if the columns end in half of a tile of this size and the
// LSE is below −88.7, unless lengths hide the rest of the tile.
constexpr std::int64_t kBackwardTile = 128;

constexpr std::array kRates{H200Rates{64, 64, kInLongRuns * 493e12, kInLongRuns * 469e12},
                            H200Rates{128, 128, kInLongRuns * 698e12, kInLongRuns * 659e12},
                            H200Rates{192, 128, kInLongRuns * 686e12, kInLongRuns * 628e12},
                            H200Rates{256, 256, kInLongRuns * 739e12, kInLongRuns * 694e12}};
// Rates of long walks. They were measured at 16k, without the time of tiles and of the mask's edges
// at that length.
constexpr std::array kBackwardRates{
    H200Rates{64, 64, 452e12, 466e12}, H200Rates{128, 128, 545e12, 545e12},
    H200Rates{192, 128, 314e12, 517e12}, H200Rates{256, 256, 359e12, 408e12}};

class SdpaImplementation final : public Implementation {
 public:
  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }
  [[nodiscard]] const Declaration& declares() const noexcept override { return declaration_; }
  [[nodiscard]] Capability accepts(const AttentionProblem& problem, Place place) const override {
    return sdpa_accepts(problem, place);
  }
  [[nodiscard]] Capability available(Place place) const override { return sdpa_available(place); }
  [[nodiscard]] Capability takes(const AttentionProblem& problem,
                                 const BlockGeometry& block) const override {
    return sdpa_takes(problem, block);
  }
  [[nodiscard]] Capability takes_backward(const AttentionProblem& problem,
                                          const BlockGeometry& block) const override {
    return sdpa_takes_backward(problem, block);
  }
  // cuDNN splits the keys of a single row among multiprocessors. The order in which it adds their
  // parts varies.
  [[nodiscard]] bool repeats_bits(const BlockGeometry& block) const override {
    return block.rows.size() > 1;
  }
  [[nodiscard]] double assumed_rate(const ProblemClass& problem, Place /*place*/) const override {
    return h200_rate(problem.pass == Pass::backward ? kBackwardRates : kRates, problem);
  }
  [[nodiscard]] std::unique_ptr<Kernel> make_kernel(const AttentionProblem& problem,
                                                    Device& device) const override {
    return make_sdpa_kernel(problem, device);
  }

 private:
  static constexpr FeatureSet kFeatures{Feature::causal, Feature::window, Feature::segments,
                                        Feature::lengths};
  std::vector<std::string> names_{"sdpa", "cudnn", "cuda_flash_attn2"};
  // cuDNN computes delta itself, as rowsum(dO ∘ output). If dO is 0, no output gives the delta.
  Declaration declaration_{.features = kFeatures,
                           .blocks = BlockForm::straight,
                           .results = ResultForm::rounded,
                           .backward = BackwardDeclaration{.features = kFeatures,
                                                           .blocks = BlockForm::straight,
                                                           .repeats_bits = false,
                                                           .rounds = true,
                                                           .takes_grad_lse = false}};
};

}  // namespace

bool is_limited(std::int64_t side) {
  return side != Band::kUnlimited && side != -Band::kUnlimited;
}

Capability sdpa_accepts(const AttentionProblem& problem, Place place) {
  if (place.is_host()) return Capability::no("cuDNN runs on CUDA devices, not on the CPU");
  if (problem.dtype != DType::float16 && problem.dtype != DType::bfloat16) {
    return Capability::no("cuDNN computes float16 and bfloat16, not " +
                          std::string(name_of(problem.dtype)));
  }
  if (!(problem.logit_scale() > 0)) {
    return Capability::no("cuDNN takes the maximum before it scales, so it needs a positive scale");
  }
  const std::int64_t dim = problem.shape.head_dim;
  const std::int64_t value_dim = problem.shape.value_dim;
  const bool known = (dim == value_dim && dim <= 256) || (dim == 192 && value_dim == 128);
  if (!known || dim % kSdpaVector != 0) {
    return Capability::no(fmt::format(
        "cuDNN needs equal head dimensions that are multiples of {} up to 256, or 192 with 128 for "
        "values, not {} with {}",
        kSdpaVector, dim, value_dim));
  }
  return Capability::yes();
}

LocalMask sdpa_mask(const AttentionProblem& problem, const BlockGeometry& block) {
  if (block.unmasked) return {};
  return local_mask(problem.mask, block.first_batch, block.batches, block.rows, block.columns);
}

Capability sdpa_takes(const AttentionProblem& problem, const BlockGeometry& block) {
  LocalMask mask = sdpa_mask(problem, block);
  if (mask.obstacle.empty()) {
    mask.obstacle = mask_obstacle(mask, block.rows.size(), block.columns.size());
  }
  return mask.obstacle.empty() ? Capability::yes() : Capability::no(std::move(mask.obstacle));
}

LocalMask sdpa_backward_mask(const AttentionProblem& problem, const BlockGeometry& block) {
  LocalMask mask = sdpa_mask(problem, block);
  if (mask.obstacle.empty() && !mask.padded() && block.columns.size() % kBackwardTile != 0) {
    const auto batches = static_cast<std::size_t>(block.batches);
    mask.row_lengths.assign(batches, static_cast<std::int32_t>(block.rows.size()));
    mask.column_lengths.assign(batches, static_cast<std::int32_t>(block.columns.size()));
  }
  return mask;
}

Capability sdpa_takes_backward(const AttentionProblem& problem, const BlockGeometry& block) {
  if (block.rows.size() == 1 && block.columns.size() == 1) {
    return Capability::no("a single row and column, for which cuDNN has no backward pass");
  }
  return sdpa_takes(problem, block);
}

std::unique_ptr<Implementation> make_sdpa_implementation() {
  return std::make_unique<SdpaImplementation>();
}

}  // namespace annulus
