#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/sequence_layout.hpp>

namespace annulus {
namespace {

constexpr std::array kNames{
    std::pair{LayoutKind::contiguous, std::string_view("contiguous")},
    std::pair{LayoutKind::zigzag, std::string_view("zigzag")},
    std::pair{LayoutKind::striped, std::string_view("striped")},
    std::pair{LayoutKind::balanced, std::string_view("balanced")},
};

void check_at_least(const char* argument, std::int64_t value, std::int64_t least) {
  if (value < least) {
    throw ArgumentError(argument, std::to_string(value), fmt::format("{} or more", least));
  }
}

}  // namespace

std::string_view name_of(LayoutKind kind) noexcept {
  return kNames[static_cast<std::size_t>(kind)].second;
}

LayoutKind parse_layout(std::string_view name, const std::string& argument) {
  for (const auto& [kind, known] : kNames) {
    if (known == name) return kind;
  }
  throw ArgumentError(argument, fmt::format("'{}'", name),
                      "contiguous, zigzag, striped or balanced");
}

SequenceLayout::SequenceLayout(LayoutKind kind, std::int64_t length, int ranks,
                               std::int64_t granule)
    : kind_(kind), length_(length), ranks_(ranks), granule_(granule) {
  check_at_least("sequence length", length, 0);
  check_at_least("sequence ranks", ranks, 1);
  check_at_least("sequence granule", granule, 1);
  if (kind == LayoutKind::striped && granule > 1) {
    throw ArgumentError("sequence granule", std::to_string(granule),
                        "1 or none with the layout striped, which distributes single positions");
  }
  if (kind == LayoutKind::balanced) {
    throw ArgumentError("sequence layout", "balanced", "an assignment, which says who holds what");
  }
}

SequenceLayout::SequenceLayout(Assignment assignment)
    : kind_(LayoutKind::balanced),
      length_(assignment.length()),
      ranks_(assignment.ranks()),
      granule_(1),
      assignment_(std::move(assignment)) {}

std::int64_t SequenceLayout::chunks() const noexcept {
  return kind_ == LayoutKind::zigzag ? 2 * std::int64_t{ranks_} : ranks_;
}

PositionRange SequenceLayout::chunk(std::int64_t index) const {
  const std::int64_t granules = length_ / granule_;
  const std::int64_t fewest = granules / chunks();
  const std::int64_t larger =
      granules % chunks();  // this many chunks, the first ones, hold one more
  const std::int64_t begin = (index * fewest + std::min(index, larger)) * granule_;
  const std::int64_t whole = (fewest + (index < larger ? 1 : 0)) * granule_;
  return {GlobalPosition(begin), index == chunks() - 1 ? length_ - begin : whole, 1};
}

PositionRanges SequenceLayout::positions(int rank) const {
  if (rank < 0 || rank >= ranks_) {
    throw InternalError(fmt::format("rank {} of a sequence on {} ranks", rank, ranks_));
  }
  if (assignment_) return assignment_->positions(rank);
  if (kind_ == LayoutKind::contiguous) return PositionRanges({chunk(rank)});
  if (kind_ == LayoutKind::zigzag) {
    return PositionRanges({chunk(rank), chunk(chunks() - 1 - rank)});
  }
  const std::int64_t count =
      (length_ - std::min<std::int64_t>(rank, length_) + ranks_ - 1) / ranks_;
  return PositionRanges({{GlobalPosition(rank), count, ranks_}});
}

int SequenceLayout::owner(GlobalPosition position) const {
  const std::int64_t at = position.value();
  if (at < 0 || at >= length_) {
    throw InternalError(fmt::format("position {} of a sequence of length {}", at, length_));
  }
  if (assignment_) return assignment_->owner(position);
  if (kind_ == LayoutKind::striped) return static_cast<int>(at % ranks_);
  const std::int64_t granules = length_ / granule_;
  const std::int64_t fewest = granules / chunks();
  const std::int64_t larger = granules % chunks();
  const std::int64_t granule = at / granule_;
  const std::int64_t in_larger = larger * (fewest + 1);
  std::int64_t index = chunks() - 1;  // the ragged remainder
  if (granule < in_larger) {
    index = granule / (fewest + 1);
  } else if (granule < granules) {
    index = larger + (granule - in_larger) / fewest;
  }
  return static_cast<int>(index < ranks_ ? index : chunks() - 1 - index);
}

}  // namespace annulus
