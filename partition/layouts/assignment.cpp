#include <algorithm>
#include <cstddef>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/sequence_layout.hpp>

#include "arrays/digest.hpp"

namespace annulus {
namespace {

[[noreturn]] void fail(const std::string& value, const std::string& expected) {
  throw ArgumentError("assignment", value, expected);
}

}  // namespace

Assignment::Assignment(std::vector<PositionRanges> by_rank) {
  if (by_rank.empty()) fail("no ranks", "at least 1");
  auto data = std::make_shared<Data>();
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    const PositionRanges& held = by_rank[rank];
    for (std::size_t i = 0; i < held.ranges().size(); ++i) {
      const PositionRange& range = held.ranges()[i];
      const bool ascends = i == 0 || held.ranges()[i - 1].last() < range.start;
      if (range.stride != 1 || !ascends) {
        fail(fmt::format("{} for rank {}", to_string(held), rank), "ascending ranges of stride 1");
      }
      data->runs.push_back({range.start, range.length, static_cast<int>(rank)});
    }
  }
  std::sort(data->runs.begin(), data->runs.end(),
            [](const Run& a, const Run& b) { return a.begin < b.begin; });
  std::vector<std::int64_t> words;  // of the digest
  for (const Run& run : data->runs) {
    if (run.begin.value() != data->length) {
      fail(fmt::format("position {} {}", std::min(run.begin.value(), data->length),
                       run.begin.value() < data->length ? "twice" : "with no rank"),
           "every position once");
    }
    data->length += run.length;
    words.insert(words.end(), {run.length, run.rank});
  }
  words.push_back(static_cast<std::int64_t>(by_rank.size()));
  data->digest = annulus::digest(words.data(), words.size() * sizeof(words[0]));
  data->by_rank = std::move(by_rank);
  data_ = std::move(data);
}

int Assignment::owner(GlobalPosition position) const {
  const auto behind =
      std::upper_bound(data_->runs.begin(), data_->runs.end(), position,
                       [](GlobalPosition p, const Run& run) { return p < run.begin; });
  return std::prev(behind)->rank;
}

}  // namespace annulus
