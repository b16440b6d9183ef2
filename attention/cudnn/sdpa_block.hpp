#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include <annulus/attention/implementation.hpp>
#include <annulus/attention/local_mask.hpp>

#include "cudnn/sdpa_plan.hpp"

// Blocks in the form that both passes of cuDNN's attention take.
namespace annulus {

/// Why cuDNN cannot read or write a tensor with this layout; empty if it can.
[[nodiscard]] std::string sdpa_layout_obstacle(const char* name, const ConstTensorView& tensor);

[[nodiscard]] bool is_empty(const AttentionBlock& block);

/// The descriptor of a plan for the block, without its mask and the parts of a pass.
[[nodiscard]] SdpaDescriptor describe(const AttentionProblem& problem, const AttentionBlock& block);
[[nodiscard]] SdpaDescriptor::Strides first_strides(const ConstTensorView& view);

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

/// The data that a kernel keeps for a block: the plan of a pass, and the lengths of the batches.
struct SdpaKept {
  std::shared_ptr<const SdpaPlan> plan;
  SdpaLengths lengths;
};

/// The data that a kernel keeps for the blocks that it was prepared for. Blocks of one shape share
/// the data if they have the same positions or no mask.
class SdpaBlocks {
 public:
  /// Both must outlive it.
  SdpaBlocks(const AttentionProblem& problem, Device& device)
      : problem_(problem), device_(device) {}

  /// The data for the block, made when the block is new. `shape` is a descriptor without the mask.
  /// Throws UnsupportedError for a block that cuDNN cannot take.
  const SdpaKept& find(const SdpaDescriptor& shape, const AttentionBlock& block);

 private:
  struct Entry {
    SdpaDescriptor shape;
    PositionRanges rows, columns;
    std::int64_t first_batch;
    bool unmasked;
    SdpaKept kept;
  };

  [[nodiscard]] SdpaKept make(SdpaDescriptor descriptor, const AttentionBlock& block) const;

  const AttentionProblem& problem_;
  Device& device_;
  std::unordered_multimap<std::size_t, Entry> entries_;  // by hash_of_both
};

}  // namespace annulus
