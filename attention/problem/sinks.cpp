#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include <annulus/attention/philox.hpp>
#include <annulus/attention/problem.hpp>
#include <annulus/core/error.hpp>

namespace annulus {

Sinks::Sinks(const Extents& shape, std::vector<float> logits) {
  if (shape.rank() < 1 || shape.rank() > 2 || shape.product() < 1) {
    throw ArgumentError("sinks", "shape " + to_string(shape), "[N,M] or [M], with sizes from 1 on");
  }
  if (static_cast<std::int64_t>(logits.size()) != shape.product()) {
    throw ArgumentError("sinks", fmt::format("{} logits", logits.size()),
                        fmt::format("{} for shape {}", shape.product(), to_string(shape)));
  }
  std::uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a, a word at a time
  const auto add = [&hash](std::uint64_t value) { hash = (hash ^ value) * 0x100000001b3U; };
  for (int dim = 0; dim < shape.rank(); ++dim) add(static_cast<std::uint64_t>(shape[dim]));
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!(logits[i] < std::numeric_limits<float>::infinity())) {
      throw ArgumentError("sinks", fmt::format("{} at index {}", logits[i], i),
                          "finite numbers or -inf");
    }
    add(std::bit_cast<std::uint32_t>(logits[i]));
  }
  data_ = std::make_shared<const Data>(Data{shape, std::move(logits), hash});
}

Sinks Sinks::random(std::int64_t heads, std::int64_t per_head, std::uint64_t seed) {
  constexpr std::uint32_t kSinkStream = 0x73696e6b;  // apart from a seed's other uses
  const Extents shape{heads, per_head};
  std::vector<float> logits;
  for (std::int64_t i = 0; i < shape.product(); ++i) {
    const auto word = philox({static_cast<std::uint32_t>(i), 0, 0, kSinkStream}, philox_key(seed));
    logits.push_back(static_cast<float>(std::ldexp(word[0], -30) - 2));
  }
  return {shape, std::move(logits)};
}

std::span<const float> Sinks::of_head(std::int64_t head) const {
  const auto count = static_cast<std::size_t>(per_head());
  const std::size_t first = shape().rank() == 1 ? 0 : static_cast<std::size_t>(head) * count;
  return std::span(data_->logits).subspan(first, count);
}

double log_sum_exp(std::span<const float> logits) {
  double max = -std::numeric_limits<double>::infinity();
  for (const double logit : logits) {
    if (!(logit <= max)) max = std::isnan(max) ? max : logit;  // keeps a NaN
  }
  if (max == -std::numeric_limits<double>::infinity()) return max;
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - max);
  return max + std::log(sum);
}

bool Sinks::operator==(const Sinks& other) const {
  return data_ == other.data_ || (shape() == other.shape() && data_->logits == other.data_->logits);
}

void Sinks::validate(std::int64_t heads) const {
  if (shape().rank() == 1 || shape()[0] == heads) return;
  throw ArgumentError("sinks", "shape " + to_string(shape()),
                      fmt::format("[N,M] with N = {} query heads, or [M]", heads));
}

std::string to_string(const Sinks& sinks) {
  return "sinks " + to_string(sinks.shape());
}

}  // namespace annulus
