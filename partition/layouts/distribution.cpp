#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/sequence_layout.hpp>

namespace annulus {

Distribution Distribution::sequence(LayoutKind layout, std::int64_t granule) {
  static_cast<void>(SequenceLayout(layout, 0, 1, granule));  // for its errors
  Distribution result;
  result.kind_ = Kind::sequence;
  result.layout_ = layout;
  result.granule_ = granule;
  return result;
}

Distribution Distribution::assigned(Assignment assignment) {
  Distribution result;
  result.kind_ = Kind::assigned;
  result.layout_ = LayoutKind::balanced;
  result.assignment_ = std::move(assignment);
  return result;
}

Distribution Distribution::kv_heads() {
  Distribution result;
  result.kind_ = Kind::kv_heads;
  return result;
}

bool Distribution::fits(std::int64_t size, int ranks) const noexcept {
  if (assignment_) return size == assignment_->length() && ranks == assignment_->ranks();
  return kind_ == Kind::sequence || size % ranks == 0 || copies(size, ranks) > 1;
}

int Distribution::copies(std::int64_t size, int ranks) const noexcept {
  const bool shared = kind_ == Kind::kv_heads && size > 0 && size < ranks && ranks % size == 0;
  return shared ? static_cast<int>(ranks / size) : 1;
}

PositionRanges Distribution::positions(std::int64_t size, int ranks, int coordinate) const {
  if (kind_ == Kind::sequence) {
    return SequenceLayout(layout_, size, ranks, granule_).positions(coordinate);
  }
  if (assignment_) return assignment_->positions(coordinate);
  const int sharing = copies(size, ranks);
  const std::int64_t count = size * sharing / ranks;
  return PositionRanges({{GlobalPosition(coordinate / sharing * count), count, 1}});
}

std::string to_string(const Distribution& distribution) {
  switch (distribution.kind()) {
    case Distribution::Kind::block:
      return "block";
    case Distribution::Kind::kv_heads:
      return "kv_heads";
    case Distribution::Kind::assigned:
      return "balanced:" + distribution.assignment()->digest().substr(0, 8);
    case Distribution::Kind::sequence:
      break;
  }
  std::string text(name_of(distribution.layout()));
  if (distribution.granule() != 1) text += fmt::format(":{}", distribution.granule());
  return text;
}

}  // namespace annulus
