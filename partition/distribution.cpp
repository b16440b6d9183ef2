#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/distribution.hpp>

namespace annulus {

Distribution Distribution::sequence(LayoutKind layout, std::int64_t granule) {
  static_cast<void>(SequenceLayout(layout, 0, 1, granule));  // for its errors
  Distribution result;
  result.kind_ = Kind::sequence;
  result.layout_ = layout;
  result.granule_ = granule;
  return result;
}

Distribution Distribution::dealt(Dealing dealing) {
  Distribution result;
  result.kind_ = Kind::dealt;
  result.layout_ = LayoutKind::balanced;
  result.dealing_ = std::move(dealing);
  return result;
}

Distribution Distribution::kv_heads() {
  Distribution result;
  result.kind_ = Kind::kv_heads;
  return result;
}

bool Distribution::fits(std::int64_t size, int ranks) const noexcept {
  if (dealing_) return size == dealing_->length() && ranks == dealing_->ranks();
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
  if (dealing_) return dealing_->positions(coordinate);
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
    case Distribution::Kind::dealt:
      return "balanced:" + distribution.dealing()->digest().substr(0, 8);
    case Distribution::Kind::sequence:
      break;
  }
  std::string text(name_of(distribution.layout()));
  if (distribution.granule() != 1) text += fmt::format(":{}", distribution.granule());
  return text;
}

}  // namespace annulus
