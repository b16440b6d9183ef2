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

/// Which columns of the blocks that await them have arrived: a number for each such block, which
/// its kernel reads while it runs (AttentionBlock::arrived_from).
class Arrivals {
 public:
  /// Allocates memory only if some block awaits columns.
  Arrivals(const RankPlan& plan, MemoryPool& memory);

  [[nodiscard]] bool any() const noexcept { return !beginnings_.empty(); }
  /// The number of the block that is task `task`; null if it awaits no columns.
  [[nodiscard]] const std::int32_t* number_of(std::size_t task) const { return numbers_[task]; }
  /// Call before the exchanges of a call: says that only the rank's own columns are there. Ordered
  /// by `stream`.
  void begin(const LocalOperations& operations, Stream& stream) const;
  /// Call after the exchange that is task `task`, with its stream: says that its columns are there.
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
