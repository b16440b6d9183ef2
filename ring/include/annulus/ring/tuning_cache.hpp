#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <annulus/ring/tuning.hpp>

namespace annulus::ring {

/// Everything that a measurement depends on, by name: device, versions, shapes, mesh, … as texts.
using TuningKey = std::map<std::string, std::string>;

/// The result of one measurement.
struct TuningEntry {
  TuningKey key;
  Choice choice;
  std::string date;  ///< "2026-11-22T12:00:00Z"
  std::vector<TunedCandidate> candidates;
  bool operator==(const TuningEntry&) const = default;
};

/// Entries in memory, for all attention of a program that is given it. Safe to use from several
/// threads.
class TuningCache {
 public:
  [[nodiscard]] std::optional<TuningEntry> find(const TuningKey& key) const;
  /// Replaces an entry of the same key.
  void keep(TuningEntry entry);
  void forget(const TuningKey& key);
  void clear();

 private:
  mutable std::mutex mutex_;
  std::map<TuningKey, TuningEntry> entries_;
};

}  // namespace annulus::ring
