#include <utility>

#include <annulus/ring/tuning_cache.hpp>

namespace annulus::ring {

std::optional<TuningEntry> TuningCache::find(const TuningKey& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return std::nullopt;
  return found->second;
}

void TuningCache::keep(TuningEntry entry) {
  const std::lock_guard lock(mutex_);
  TuningKey key = entry.key;
  entries_.insert_or_assign(std::move(key), std::move(entry));
}

void TuningCache::forget(const TuningKey& key) {
  const std::lock_guard lock(mutex_);
  entries_.erase(key);
}

void TuningCache::clear() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
}

}  // namespace annulus::ring
