#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <annulus/core/memory.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/ring/local_operations.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// How far the columns have come that blocks of a plan await: a number for each such block, which
/// its kernel reads while it computes (AttentionBlock::arrived_from).
class Arrivals {
 public:
  /// Takes memory only if some block awaits columns.
  Arrivals(const RankPlan& plan, MemoryPool& memory);

  [[nodiscard]] bool any() const noexcept { return !beginnings_.empty(); }
  /// The number of the block that is this task; null if it awaits nothing.
  [[nodiscard]] const std::int32_t* number_of(std::size_t task) const { return numbers_[task]; }
  /// Before the exchanges of a call: only the rank's own columns are there. Ordered by `stream`.
  void begin(const LocalOperations& operations, Stream& stream) const;
  /// After the exchange that is this task, on its stream: what it has brought is there.
  void announce(std::size_t task, const LocalOperations& operations, Stream& stream) const;

 private:
  struct Announcement {
    std::int32_t* number;
    std::int32_t column;  // of the block; the columns from this one on are there
  };

  Tensor memory_;
  std::vector<std::int32_t*> numbers_;         // by task
  std::vector<std::vector<Announcement>> of_;  // by task: those of an exchange
  std::vector<Announcement> beginnings_;
};

}  // namespace annulus::ring
