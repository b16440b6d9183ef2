#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/ring/plan.hpp>

/// Where the results of a rank's blocks lie, and when they are brought together: what the executor
/// does around its kernels, as plain data. A pure function of the rank's plan and of the memory
/// that merging may take.
///
/// Results lie in slots, each of which holds rows × heads of partial output and LSE; results of one
/// dtype that share no row and head may share a slot. Slot 0 is as large as the rank's output; the
/// others as the largest group of heads, the heads that some blocks have in common. When the last
/// block of a group is done, its results are combined into the output, all at once and rounded
/// once. When the slots do not suffice, what there is so far is folded into one of them, in
/// float32.
namespace annulus::ring {

/// What the partial results of a device may take, unless the output in float32 would take more.
inline constexpr std::int64_t kMergeBytes = std::int64_t{512} << 20;

struct MergeRules {
  /// Slots for results, at least 2.
  int slots = 2;
  /// In which dtype the result of a block comes: float32 or the problem's.
  std::function<DType(const Block&)> dtype_of = [](const Block&) { return DType::float32; };
  /// Slot 0 takes results of this dtype only. If it is float32, it also takes what is folded; an
  /// extra slot does otherwise.
  DType first_dtype = DType::float32;
  /// Whether slot 0 is the output itself, so that results which are alone there are done.
  bool first_is_output = false;
  /// The most results that can be combined at once.
  int most_parts = kMostParts;
};

/// A result in a slot.
struct Part {
  int slot = 0;
  DType dtype = DType::float32;
  LocalRange rows;
  HeadRange heads;
  bool operator==(const Part&) const = default;
};

/// Brings the results for some heads together, in this order; all rows.
struct Combination {
  static constexpr int kOutput = -1;
  std::vector<Part> parts;
  HeadRange heads;
  int into = kOutput;  ///< slot, or the output
};

/// What happens around one block.
struct BlockMerge {
  std::optional<Combination> before;  ///< makes room
  int slot = 0;                       ///< of its result
  std::optional<Combination> after;   ///< the block was its group's last
};

struct MergePlan {
  std::vector<BlockMerge> blocks;  ///< of all steps, in their order
  std::vector<Combination> rest;   ///< heads that no block computes
  int slots = 0;                   ///< used by results
  /// Slot that takes what is folded, with the extent of those after the first; −1 for none.
  int fold_slot = -1;
  std::int64_t group_heads = 0;  ///< heads of the largest group
};

[[nodiscard]] MergePlan plan_merges(const RankPlan& plan, const MergeRules& rules);

}  // namespace annulus::ring
