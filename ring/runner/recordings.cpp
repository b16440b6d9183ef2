#include "runner/recordings.hpp"

#include <algorithm>

namespace annulus::ring {
namespace {

// Sets of tensors that are used in turn, such as a model's layers.
constexpr std::size_t kMaximumEntries = 256;
// An entry that was used within this many calls counts as in use.
constexpr std::size_t kInUse = 4 * kMaximumEntries;

}  // namespace

Recording* Recordings::find(std::span<const TensorView> tensors,
                            const std::function<std::unique_ptr<Recording>()>& record) {
  const bool first_call = calls_++ == 0;
  Entry* entry = known(tensors);
  // A new call is not recorded: it loads kernels, and may never come again.
  const bool as_it_is = uniform_ ? first_call : entry == nullptr;
  if (entry == nullptr) entry = add(tensors);
  if (entry == nullptr) return nullptr;
  entry->used = calls_;
  if (as_it_is) return nullptr;
  if (!entry->recording) entry->recording = record();
  return entry->recording.get();
}

void Recordings::clear() noexcept {
  entries_.clear();
  next_ = 0;
}

void Recordings::restart() noexcept {
  clear();
  calls_ = 0;
}

Recordings::Entry* Recordings::known(std::span<const TensorView> tensors) {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const std::size_t index = (next_ + i) % entries_.size();
    if (std::ranges::equal(entries_[index].tensors, tensors)) {
      next_ = index + 1;
      return &entries_[index];
    }
  }
  return nullptr;
}

// Makes room by forgetting the least recently used entry. If even that one is in use, because more
// sets than fit take turns, the new call is not recorded: forgetting an entry each time would
// record every call anew. Uniform calls must all be recorded, so there the most recently used entry
// goes, since a cycle needs it last.
Recordings::Entry* Recordings::add(std::span<const TensorView> tensors) {
  if (entries_.size() == kMaximumEntries) {
    const auto [oldest, newest] = std::ranges::minmax_element(entries_, {}, &Entry::used);
    const bool in_use = calls_ - oldest->used <= kInUse;
    if (in_use && !uniform_) return nullptr;
    entries_.erase(in_use ? newest : oldest);
  }
  entries_.push_back({{tensors.begin(), tensors.end()}, nullptr, 0});
  next_ = entries_.size();
  return &entries_.back();
}

}  // namespace annulus::ring
