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
  /// Takes memory for all buffers that are not the caller's, from memory that the device's calls
  /// use one after the other. Buffers that a group exchanges lie in one piece of its exchange
  /// memory, so that a transport registers or maps it once; the others lie in another piece.
  /// `groups` are the plan's. The references must outlive the object.
  PlanMemory(const RankPlan& plan, std::span<Group* const> groups, Device& device);

  /// Sets the caller's tensors, one for each caller buffer, in the order of the buffers.
  void bind(std::vector<TensorView> tensors) { caller_ = std::move(tensors); }
  [[nodiscard]] const std::vector<TensorView>& bound() const noexcept { return caller_; }
  /// The required shapes of the caller's tensors: contiguous, without memory.
  [[nodiscard]] std::vector<TensorView> expected() const;

  /// One content of a region: [batch, tokens, heads, width]; [batch, heads, tokens] for an LSE and
  /// the like; [batch, heads, tokens, keys] for a bias, its gradient or a mask. Without dimensions
  /// for buffer −1.
  [[nodiscard]] TensorView view(const Region& region, Content content) const;
  /// Appends the tensor copies that make up a copy task.
  void add_copies(const Copy& copy, std::vector<TensorCopy>& copies) const;
  [[nodiscard]] SoftmaxState state(const Result& result) const;
  /// Bias and dense mask for a block's batches, heads and rows. They cover all `kv_length` keys of
  /// the problem or the block's columns, as its buffers do.
  [[nodiscard]] ScoreTensors scores(const Tile& block, std::int64_t kv_length) const;
  /// The address of the first token of a range in an exchange buffer.
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
  std::vector<void*> data_;  // by buffer; unused for the caller's
  std::vector<TensorView> caller_;
  std::vector<std::size_t> caller_index_;  // by buffer
};

}  // namespace annulus::ring
