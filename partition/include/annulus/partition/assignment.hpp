#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <annulus/core/position.hpp>

namespace annulus {

/// The positions of a sequence that each rank holds, as a list instead of a formula: for example,
/// rows distributed by their work (see ring::assign_rows()). Plain data; copies share it.
class Assignment {
 public:
  /// Takes the positions of each rank. Throws ArgumentError("assignment", …) unless there is a
  /// rank, all ranges have stride 1, a rank's ranges ascend, and every position from 0 to the last
  /// is held by exactly one rank.
  explicit Assignment(std::vector<PositionRanges> by_rank);

  [[nodiscard]] std::int64_t length() const noexcept { return data_->length; }
  [[nodiscard]] int ranks() const noexcept { return static_cast<int>(data_->by_rank.size()); }
  /// Requires a rank in [0, ranks()).
  [[nodiscard]] const PositionRanges& positions(int rank) const {
    return data_->by_rank[static_cast<std::size_t>(rank)];
  }
  /// The rank that holds a position in [0, length()). Takes time logarithmic in the number of
  /// ranges.
  [[nodiscard]] int owner(GlobalPosition position) const;
  /// 32 hexadecimal digits, equal for equal assignments.
  [[nodiscard]] const std::string& digest() const noexcept { return data_->digest; }
  bool operator==(const Assignment& other) const {
    return data_ == other.data_ || data_->by_rank == other.data_->by_rank;
  }

 private:
  struct Run {
    GlobalPosition begin;
    std::int64_t length;
    int rank;
  };
  struct Data {
    std::vector<PositionRanges> by_rank;
    std::vector<Run> runs;  // of all ranks, in ascending order
    std::int64_t length = 0;
    std::string digest;
  };
  std::shared_ptr<const Data> data_;
};

}  // namespace annulus
