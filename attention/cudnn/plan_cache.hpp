#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <annulus/core/error.hpp>

namespace annulus {

/// A cache of plans that are slow to make. The first caller who asks for a key makes its plan;
/// other callers who ask for the same key wait. If there are more than `most` plans, the least
/// recently used ones leave the cache; a caller who still holds one keeps it. Several threads may
/// use the cache, and plans for different keys are made at the same time.
template <class Key, class Plan, class Hash = std::hash<Key>>
class PlanCache {
 public:
  using Pointer = std::shared_ptr<const Plan>;

  explicit PlanCache(std::size_t most) : most_(most) {}

  /// Returns the plan for `key`, and calls `make` if the cache has none. The cache remembers a
  /// refusal (UnsupportedError) and throws it again. Any other error is thrown in all threads that
  /// wait for the plan, and is then forgotten.
  Pointer get(const Key& key, const std::function<Pointer()>& make) {
    std::promise<Pointer> promise;
    std::uint64_t own = 0;
    std::shared_future<Pointer> known;
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = by_key_.find(key); found != by_key_.end()) {
        entries_.splice(entries_.begin(), entries_, found->second);
        known = found->second->plan;
      } else {
        own = ++made_;
        entries_.push_front({key, own, promise.get_future().share()});
        by_key_[key] = entries_.begin();
        while (entries_.size() > most_) {
          by_key_.erase(entries_.back().key);
          entries_.pop_back();
        }
      }
    }
    if (known.valid()) return known.get();
    try {
      Pointer plan = make();
      promise.set_value(plan);
      return plan;
    } catch (const UnsupportedError&) {
      promise.set_exception(std::current_exception());
      throw;
    } catch (...) {
      promise.set_exception(std::current_exception());
      forget(key, own);
      throw;
    }
  }

  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return entries_.size();
  }
  /// The number of plans that were made or refused so far.
  [[nodiscard]] std::uint64_t made() const {
    const std::lock_guard lock(mutex_);
    return made_;
  }

 private:
  struct Entry {
    Key key;
    std::uint64_t number;
    std::shared_future<Pointer> plan;
  };

  void forget(const Key& key, std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = by_key_.find(key);
    if (found == by_key_.end() || found->second->number != number) return;
    entries_.erase(found->second);
    by_key_.erase(found);
  }

  const std::size_t most_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // the latest used first
  std::unordered_map<Key, typename std::list<Entry>::iterator, Hash> by_key_;
  std::uint64_t made_ = 0;
};

}  // namespace annulus
