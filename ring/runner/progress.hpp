#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <annulus/core/place.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/ring/plan.hpp>

#include "runner/exchange_queue.hpp"

namespace annulus::ring {

/// How far a call has come on a device, which shows only the marks of its streams: a mark of each
/// exchange, and one behind each long block of the compute stream.
class Progress {
 public:
  /// The references must outlive it.
  Progress(const RankPlan& plan, Place place, Stream& computing,
           const std::vector<ExchangeQueue>& queues);

  /// To be called when a call begins, and after each task of the compute stream.
  void begin() const;
  void mark(std::size_t task) const;

  /// A number that changes when a stream has come further. A replayed call is work of the compute
  /// stream alone.
  [[nodiscard]] std::uint64_t moved() const;
  /// True once an exchange of a call has begun, until the exchanges have ended.
  [[nodiscard]] bool is_under_way() const;
  /// True if this rank waits only for its own work: no exchange is left, or the next one waits for
  /// the rank's own computation.
  [[nodiscard]] bool awaits_only_itself() const;
  /// The text of a timeout: whom the rank waits for, and for what.
  [[nodiscard]] std::string describe() const;

 private:
  [[nodiscard]] bool is_long(const Task& task) const;

  const RankPlan& plan_;
  Place place_;
  Stream& computing_;
  const std::vector<ExchangeQueue>& queues_;
  std::vector<std::uint32_t> marked_through_;  // by task: the mark of the last long block up to it
};

}  // namespace annulus::ring
