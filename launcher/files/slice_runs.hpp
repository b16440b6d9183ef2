#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::files {

/// Bytes that are contiguous both in the file's data and in memory. Both offsets are in bytes, from
/// the first element of the array and of the view.
struct Run {
  std::int64_t file = 0;
  std::int64_t memory = 0;
  std::int64_t bytes = 0;
  [[nodiscard]] std::int64_t file_end() const { return file + bytes; }
};

/// The most bytes of the file that several runs of one transfer span.
inline constexpr std::int64_t kStagingBytes = std::int64_t{4} << 20;

/// Runs to move by one system call: either one run of any length, or several in the order of the
/// file that span at most kStagingBytes.
using Transfer = std::function<void(std::span<const Run>)>;

/// Splits a slice into transfers. `index` holds the positions per dimension of a dense array of
/// `shape`; `view` is their place in memory (its data is not touched). Runs of one transfer have at
/// most `max_gap` bytes between them in the file. Throws InternalError when index, shape and view
/// do not fit together.
void for_each_transfer(const Extents& shape, std::span<const PositionRanges> index,
                       const ConstTensorView& view, std::int64_t max_gap, const Transfer& transfer);

}  // namespace annulus::files
