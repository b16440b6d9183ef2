#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/philox.hpp>
#include <annulus/attention/score_tensors.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/verification/random_scores.hpp>
#include <annulus/verification/random_tensor.hpp>

#include "entries.hpp"

namespace annulus::verification {
namespace {

// True if the mask hides all pairs to which an entry of a bias of this shape applies.
bool hides(const AttentionProblem& problem, const Extents& bias, const Entry& entry) {
  const AttentionShape& shape = problem.shape;
  const std::array whole{shape.batch, shape.heads, shape.query_length, shape.kv_length};
  const auto begin = [&](int dim) {
    return bias[dim] == 1 ? 0 : entry[static_cast<std::size_t>(dim)];
  };
  const auto end = [&](int dim) {
    const auto at = static_cast<std::size_t>(dim);
    return bias[dim] == 1 ? whole[at] : entry[at] + 1;
  };
  for (std::int64_t b = begin(0); b < end(0); ++b) {
    for (std::int64_t n = begin(1); n < end(1); ++n) {
      for (std::int64_t t = begin(2); t < end(2); ++t) {
        for (std::int64_t s = begin(3); s < end(3); ++s) {
          if (problem.mask.visible(b, n, GlobalPosition(t), GlobalPosition(s))) return false;
        }
      }
    }
  }
  return true;
}

// The dense mask at the entries of a part of the bias. Without dimensions if there is no dense
// mask, or if it may hide only some of the pairs of a bias entry.
Tensor mask_at(const AttentionProblem& problem, const FillPart& fill, const TensorView& part,
               std::span<const PositionRanges> index, MemoryPool& memory) {
  if (!problem.dense_mask || !fill) return {};
  const Extents& mask = *problem.dense_mask;
  std::vector<PositionRanges> wanted(index.begin(), index.end());
  Extents shape = part.shape();
  for (int dim = 0; dim < 4; ++dim) {
    if (mask[dim] == 1) {
      wanted[static_cast<std::size_t>(dim)] = PositionRanges::all(1);
      shape[dim] = 1;
    } else if ((*problem.bias)[dim] == 1) {
      return {};
    }
  }
  const Tensor entries(DType::boolean, shape, memory);
  fill(entries.view(), wanted);
  Tensor result(DType::boolean, part.shape(), memory);
  copy(broadcast_to(entries.view(), part.shape()), result.view());
  return result;
}

}  // namespace

FillPart random_bias(const Extents& shape, double deviation, std::uint64_t seed, int threads) {
  return [=](const TensorView& part, std::span<const PositionRanges> index) {
    fill_random(part, index, shape, seed, Operand::bias, threads);
    auto* const entries = part.as<float>();
    const auto factor = static_cast<float>(deviation);
    for (std::int64_t i = 0; i < part.elements(); ++i) entries[i] *= factor;
  };
}

FillPart random_mask(const Extents& shape, double density, std::uint64_t seed) {
  if (!(density >= 0 && density <= 1)) {
    throw ArgumentError("density", fmt::format("{}", density), "a number from 0 to 1");
  }
  constexpr std::uint32_t kMaskStream = 0x6d61736b;  // distinct from other uses of the seed
  const auto threshold = static_cast<std::uint64_t>(std::ldexp(density, 32));
  return [=](const TensorView& part, std::span<const PositionRanges> index) {
    auto* const entries = static_cast<std::uint8_t*>(part.data());
    const PhiloxKey key = philox_key(seed);
    std::uint64_t drawn = ~std::uint64_t{0};
    PhiloxCounter words{};
    for_each_entry(index, [&](const Entry& e, std::int64_t offset) {
      const std::uint64_t place = number_of(e, shape);
      if (place / 4 != drawn) {
        drawn = place / 4;
        words = philox({static_cast<std::uint32_t>(drawn), static_cast<std::uint32_t>(drawn >> 32U),
                        0, kMaskStream},
                       key);
      }
      entries[offset] = words[place % 4] < threshold ? 1 : 0;
    });
  };
}

FillPart non_finite_bias(const AttentionProblem& problem, OperandFills fills) {
  return [problem, fills = std::move(fills)](const TensorView& part,
                                             std::span<const PositionRanges> index) {
    fills.bias(part, index);
    HostMemoryPool memory;
    const Tensor mask = mask_at(problem, fills.mask, part, index, memory);
    const auto* const shown = static_cast<const std::uint8_t*>(mask.view().data());
    auto* const entries = part.as<float>();
    for_each_entry(index, [&](const Entry& entry, std::int64_t offset) {
      const bool masked = mask.shape().rank() > 0 && shown[offset] == 0;
      if (masked || hides(problem, *problem.bias, entry)) {
        entries[offset] = kNonFinite[static_cast<std::size_t>(entry[2] + 2 * entry[3]) % 3];
      }
    });
  };
}

FillPart hiding_bias(FillPart bias, FillPart mask) {
  return [bias = std::move(bias), mask = std::move(mask)](const TensorView& part,
                                                          std::span<const PositionRanges> index) {
    HostMemoryPool memory;
    const Tensor shows(DType::boolean, part.shape(), memory);
    mask(shows.view(), index);
    bias(part, index);
    const auto* const entries = static_cast<const std::uint8_t*>(shows.view().data());
    for (std::int64_t i = 0; i < part.elements(); ++i) {
      if (entries[i] == 0) part.as<float>()[i] = -std::numeric_limits<float>::infinity();
    }
  };
}

}  // namespace annulus::verification
