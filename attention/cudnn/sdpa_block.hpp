#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>

#include <annulus/attention/implementation.hpp>
#include <annulus/attention/local_mask.hpp>

#include "cudnn/sdpa_plan.hpp"

// Blocks in the form that both passes of cuDNN's attention take.
namespace annulus {

/// Why cuDNN cannot read or write a tensor with this layout; empty if it can.
[[nodiscard]] std::string sdpa_layout_obstacle(const char* name, const ConstTensorView& tensor);
/// The same for all tensors of a block, and for a bug of the loaded version under this mask.
[[nodiscard]] std::string sdpa_layout_obstacle(const AttentionBlock& block);
[[nodiscard]] std::string sdpa_version_obstacle(const LocalMask& mask, std::int64_t columns);

/// True if the shapes of a block's tensors fit together.
[[nodiscard]] bool fit_together(const AttentionBlock& block);
[[nodiscard]] bool is_empty(const AttentionBlock& block);

/// The descriptor of a plan for the block, without its mask and the parts of a pass.
[[nodiscard]] SdpaDescriptor describe(const AttentionProblem& problem, const AttentionBlock& block);
[[nodiscard]] SdpaDescriptor::Strides first_strides(const ConstTensorView& view);
void set_mask(SdpaDescriptor& descriptor, const LocalMask& mask);

/// The lengths of each batch, on the device. All views are null if batches have no lengths of their
/// own.
class SdpaLengths {
 public:
  SdpaLengths() = default;
  SdpaLengths(const LocalMask& mask, MemoryPool& memory);

  // For cuDNN, which gives NaN for batches of length 0: each length is at least 1.
  [[nodiscard]] ConstTensorView at_least_one_row() const { return part(0); }
  [[nodiscard]] ConstTensorView at_least_one_column() const { return part(1); }
  // The true lengths.
  [[nodiscard]] ConstTensorView rows() const { return part(2); }
  [[nodiscard]] ConstTensorView columns() const { return part(3); }

 private:
  [[nodiscard]] ConstTensorView part(std::int64_t i) const;

  Tensor all_;
  std::int64_t batches_ = 0;
};

/// The data that a kernel keeps for the blocks that it was prepared for. Blocks of one shape share
/// the data if they have the same positions or no mask.
template <class Kept>
class SdpaBlocks {
 public:
  /// The data for the block, made by `make` if it is new. `shape` is a descriptor without the mask.
  const Kept& find(const SdpaDescriptor& shape, const AttentionBlock& block,
                   const std::function<Kept()>& make) {
    const std::size_t hash = hash_of_both(shape, block);
    const auto [first, last] = entries_.equal_range(hash);
    for (auto known = first; known != last; ++known) {
      const Entry& entry = known->second;
      if (entry.shape == shape && entry.unmasked == block.unmasked &&
          (block.unmasked || (entry.first_batch == block.first_batch && entry.rows == block.rows &&
                              entry.columns == block.columns))) {
        return entry.kept;
      }
    }
    Entry entry{shape, block.rows, block.columns, block.first_batch, block.unmasked, make()};
    return entries_.emplace(hash, std::move(entry))->second.kept;
  }

 private:
  struct Entry {
    SdpaDescriptor shape;
    PositionRanges rows, columns;
    std::int64_t first_batch;
    bool unmasked;
    Kept kept;
  };

  static std::size_t hash_of_both(const SdpaDescriptor& shape, const AttentionBlock& block) {
    std::size_t hash = hash_of(shape);
    if (block.unmasked) return hash;
    const auto add = [&hash](std::int64_t value) {
      hash = hash * 0x100000001b3U ^ std::hash<std::int64_t>()(value);
    };
    add(block.first_batch);
    for (const PositionRanges* positions : {&block.rows, &block.columns}) {
      for (const PositionRange& range : positions->ranges()) {
        add(range.start.value());
        add(range.length);
      }
    }
    return hash;
  }

  std::unordered_multimap<std::size_t, Entry> entries_;  // by hash_of_both
};

}  // namespace annulus
