#include "slice_runs.hpp"

#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus::files {
namespace {

// Joins adjacent runs, and gathers runs that lie close in the file into one transfer.
class TransferBuilder {
 public:
  TransferBuilder(std::int64_t max_gap, const Transfer& transfer)
      : max_gap_(max_gap), transfer_(transfer) {}

  void add(const Run& run) {
    if (!runs_.empty()) {
      Run& last = runs_.back();
      const std::int64_t gap = run.file - last.file_end();
      const bool fits = run.file_end() - runs_.front().file <= kStagingBytes;
      const bool continues = gap == 0 && run.memory == last.memory + last.bytes;
      if (continues && (fits || runs_.size() == 1)) {
        last.bytes += run.bytes;
        return;
      }
      if (gap < 0 || gap > max_gap_ || !fits || runs_.size() == kMaxRuns) flush();
    }
    runs_.push_back(run);
  }

  void flush() {
    if (!runs_.empty()) transfer_(runs_);
    runs_.clear();
  }

 private:
  // Bounds the list if runs are single elements.
  static constexpr std::size_t kMaxRuns = 1U << 16U;

  std::int64_t max_gap_;
  const Transfer& transfer_;
  std::vector<Run> runs_;
};

// Visits the positions of a slice in order of the index, the last dimension fastest.
class SliceWalker {
 public:
  SliceWalker(const Extents& shape, std::span<const PositionRanges> index,
              const ConstTensorView& view, TransferBuilder& builder)
      : index_(index),
        file_strides_(contiguous_strides(shape)),
        memory_strides_(view.strides()),
        builder_(builder),
        block_(static_cast<std::int64_t>(size_of(view.dtype()))) {
    for (int dim = 0; dim < shape.rank(); ++dim) {
      file_strides_[dim] *= block_;
      memory_strides_[dim] *= block_;
    }
    // Trailing dimensions that are whole and dense in memory move as one block.
    outer_ = shape.rank();
    while (outer_ > 0 && of(outer_ - 1) == PositionRanges::all(shape[outer_ - 1]) &&
           (memory_strides_[outer_ - 1] == block_ || shape[outer_ - 1] == 1)) {
      block_ *= shape[--outer_];
    }
  }

  void walk() { walk(0, 0, 0); }

 private:
  [[nodiscard]] const PositionRanges& of(int dim) const {
    return index_[static_cast<std::size_t>(dim)];
  }

  void walk(int dim, std::int64_t file, std::int64_t memory) {
    if (dim == outer_) {
      builder_.add({file, memory, block_});
      return;
    }
    for (const PositionRange& range : of(dim).ranges()) {
      const std::int64_t start = file + range.start.value() * file_strides_[dim];
      if (dim == outer_ - 1 && range.stride == 1 && memory_strides_[dim] == block_) {
        builder_.add({start, memory, range.length * block_});
      } else {
        const std::int64_t step = range.stride * file_strides_[dim];
        for (std::int64_t i = 0; i < range.length; ++i) {
          walk(dim + 1, start + i * step, memory + i * memory_strides_[dim]);
        }
      }
      memory += range.length * memory_strides_[dim];
    }
  }

  std::span<const PositionRanges> index_;
  Extents file_strides_;  // in bytes, like the memory's
  Extents memory_strides_;
  TransferBuilder& builder_;
  std::int64_t block_;  // bytes of dimensions [outer_, rank)
  int outer_ = 0;
};

void check(const Extents& shape, std::span<const PositionRanges> index,
           const ConstTensorView& view) {
  if (!view.place().is_host()) throw InternalError("file slices need host memory");
  if (index.size() != static_cast<std::size_t>(shape.rank()) || view.rank() != shape.rank()) {
    throw InternalError(fmt::format("slice of {} with {} index entries and a view of {}",
                                    to_string(shape), index.size(), to_string(view.shape())));
  }
  for (int dim = 0; dim < shape.rank(); ++dim) {
    const PositionRanges& positions = index[static_cast<std::size_t>(dim)];
    if (positions.size() != view.size(dim)) {
      throw InternalError(fmt::format("dimension {}: {} positions into a view of {}", dim,
                                      positions.size(), to_string(view.shape())));
    }
    for (const PositionRange& range : positions.ranges()) {
      if (range.start.value() < 0 || range.stride < 1 || range.last().value() >= shape[dim]) {
        throw InternalError(fmt::format("dimension {}: positions {} of an array of {}", dim,
                                        to_string(positions), to_string(shape)));
      }
    }
  }
}

}  // namespace

void for_each_transfer(const Extents& shape, std::span<const PositionRanges> index,
                       const ConstTensorView& view, std::int64_t max_gap,
                       const Transfer& transfer) {
  check(shape, index, view);
  if (view.elements() == 0) return;
  TransferBuilder builder(max_gap, transfer);
  SliceWalker(shape, index, view, builder).walk();
  builder.flush();
}

}  // namespace annulus::files
