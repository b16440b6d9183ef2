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

/// Tells running kernels which of their columns have arrived: each block that awaits columns has a
/// number in device memory, which its kernel reads (AttentionBlock::arrived_from).
class Arrivals {
 public:
  /// Allocates memory only if a block awaits columns.
  Arrivals(const RankPlan& plan, MemoryPool& memory);

  [[nodiscard]] bool any() const noexcept { return !beginnings_.empty(); }
  /// The number of the block that is task `task`; null if it awaits no columns.
  [[nodiscard]] const std::int32_t* number_of(std::size_t task) const { return numbers_[task]; }
  /// To be called before the exchanges of a call: only the rank's own columns are there. Ordered by
  /// `stream`.
  void begin(const LocalOperations& operations, Stream& stream) const;
  /// To be called after the exchange that is task `task`, with its stream: its columns are there.
  void announce(std::size_t task, const LocalOperations& operations, Stream& stream) const;

 private:
  struct Announcement {
    std::int32_t* number;
    std::int32_t column;  // of the block; the columns from this one on are there
  };

  Tensor memory_;
  std::vector<std::int32_t*> numbers_;         // by task
  std::vector<std::vector<Announcement>> of_;  // by task, for exchanges
  std::vector<Announcement> beginnings_;
};

}  // namespace annulus::ring
