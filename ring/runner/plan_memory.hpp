#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <annulus/attention/score_tensors.hpp>
#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/call_memory.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// The memory behind the buffers of a plan, and views of it.
class PlanMemory {
 public:
  /// Takes memory for all buffers that are not the caller's, from what the calls of the device use
  /// one after the other. Buffers that a group exchanges come from its exchange memory, in one
  /// piece, so that a transport registers or maps it once; the others in another one. `groups` are
  /// those of the plan. The references must outlive it.
  PlanMemory(const RankPlan& plan, std::span<Group* const> groups, Device& device);

  /// The caller's tensors, one for each such buffer, in their order.
  void bind(std::vector<TensorView> tensors) { caller_ = std::move(tensors); }
  [[nodiscard]] const std::vector<TensorView>& bound() const noexcept { return caller_; }
  /// The shapes that they must have: contiguous, without memory.
  [[nodiscard]] std::vector<TensorView> expected() const;

  /// One content of a region: [batch, tokens, heads, width]; [batch, heads, tokens] of an LSE or
  /// the like; [batch, heads, tokens, keys] of a bias, its gradient or a mask.
  [[nodiscard]] TensorView view(const Region& region, Content content) const;
  /// Appends what a copy copies.
  void add_copies(const Copy& copy, std::vector<TensorCopy>& copies) const;
  [[nodiscard]] SoftmaxState state(const Result& result) const;
  /// See block_scores().
  [[nodiscard]] ScoreTensors scores(const Tile& block, std::int64_t kv_length) const;
  /// Where tokens of an exchange buffer begin.
  [[nodiscard]] void* address(int buffer, LocalRange tokens) const;
  /// Bytes beyond the caller's tensors.
  [[nodiscard]] std::size_t bytes() const noexcept;

 private:
  [[nodiscard]] TensorView whole(int buffer, Content content) const;
  [[nodiscard]] TensorView in_records(const Buffer& buffer, void* data, Content content) const;
  [[nodiscard]] Extents shape_of(const Buffer& buffer, Content content) const;
  void allocate(std::span<Group* const> groups, Device& device);

  const RankPlan& plan_;
  Place place_;
  std::vector<CallMemory::Piece> memory_;
  std::vector<void*> data_;  // by buffer; of the caller's, unused
  std::vector<TensorView> caller_;
  std::vector<std::size_t> caller_index_;  // by buffer
};

}  // namespace annulus::ring
