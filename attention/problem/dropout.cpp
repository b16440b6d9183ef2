#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <annulus/attention/philox.hpp>
#include <annulus/attention/problem.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

std::uint32_t threshold_of(double probability) {
  if (!(probability >= 0 && probability < 1)) {
    throw ArgumentError("dropout", fmt::format("{}", probability),
                        "a probability from 0 to below 1");
  }
  if (probability == 0) return 0;
  return static_cast<std::uint32_t>(std::clamp(std::lround(probability * 65536), 1L, 65535L));
}

}  // namespace

Dropout::Dropout(double probability, std::uint64_t seed)
    : threshold_(threshold_of(probability)), seed_(seed) {}

bool Dropout::drops(std::int64_t batch, std::int64_t head, GlobalPosition row,
                    GlobalPosition column) const {
  const std::int64_t j = column.value();
  const PhiloxCounter words =
      philox({static_cast<std::uint32_t>(j / 32 * 4 + j % 8 / 2),
              static_cast<std::uint32_t>(row.value()), third_word(head), fourth_word(batch)},
             philox_key(seed_));
  const std::uint32_t word = words[static_cast<std::size_t>(j % 32 / 8)];
  return (word >> static_cast<unsigned>(j % 2 * 16) & 0xffffU) < threshold_;
}

std::string to_string(const Dropout& dropout) {
  return fmt::format("dropout {:.5g}, seed {}", dropout.probability(), dropout.seed());
}

}  // namespace annulus
