#pragma once

#include <optional>
#include <string>
#include <vector>

#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus {
class Context;
class Registry;
}  // namespace annulus

namespace annulus::ring {

/// A sequence layout, and why it was chosen.
struct LayoutChoice {
  LayoutKind layout = LayoutKind::contiguous;
  std::string why;  ///< "predicted 0.728 ms, zigzag 0.918 ms, balanced more than 0.743 ms"
};

/// The layout to set as AttentionOptions::layout. It has the shortest predicted time of the forward
/// pass on the ranks of the context, with the best schedule that `problem` allows. The default,
/// which Attention takes by itself, is preferred if it is at most 2 % slower. The default is also
/// returned if the problem names a layout for its keys alone. A layout that the problem names is
/// returned unchanged. Rank 0 chooses. Collective over the context. Throws UserErrors.
[[nodiscard]] LayoutChoice choose_layout(const AttentionOptions& problem, Context& context);

/// The ranks for which the best mesh is wanted. They need not exist.
struct WantedRanks {
  int ranks = 1;
  int nodes = 1;            ///< a divisor of `ranks`; consecutive ranks share a node
  double memory_bytes = 0;  ///< limit for a rank's shards and buffers; 0: no limit
  Place place = {};         ///< the device of each rank
  std::string sequence_axis = "sp";
  std::optional<MeshShape> mesh = {};  ///< the only mesh to consider, of `ranks` ranks; none: all
  int most_head_shards = 0;            ///< the largest size of tp; 0: no limit
  bool backward = false;               ///< predict a forward pass and a backward pass after it
};

/// A way to compute a problem: a mesh, a layout and a schedule.
struct Recommendation {
  std::string mesh;                       ///< "tp=2,sp=4"
  int head_shards = 1;                    ///< the number of ranks that divide the heads
  std::optional<LayoutKind> layout = {};  ///< of the sequence; none if every rank has all of it
  /// None if the problem does not fit on the mesh.
  std::optional<ScheduleVariant> variant = {};
  std::string transport;
  std::string why_not;  ///< why it is not recommended; empty if it is
  bool ties = false;    ///< it is as fast as one that is recommended
  /// It can run and fits, but another is faster, or as fast with less memory.
  bool is_slow = false;
  double least = 0;  ///< lower bound of total() in seconds; 0 if not known
  PredictedRun run;  ///< 0 seconds: it was not simulated. Memory is that of the larger pass
  /// The schedule of the backward pass, if one was wanted, and its run.
  std::optional<ScheduleVariant> backward = {};
  PredictedRun backward_run = {};
  /// Seconds of the all-reduce that a model's output projection needs if heads are divided. It sums
  /// [B,T,N·Dv] in the problem's dtype over the ranks of a group. With a backward pass, the
  /// gradients of the layer's input need the same time again.
  double projection = 0;
  double rate = 0;  ///< operations of attention per second and rank

  [[nodiscard]] double total() const { return run.seconds + backward_run.seconds + projection; }
};

/// Compares meshes dp × tp × sp with every sequence layout and schedule that `problem` leaves open,
/// by total() and memory (docs/planning.md). The result begins with the best candidate for each
/// number of head shards. The first entry is the fastest one; if several tie with it, it is the one
/// with the fewest head shards. Candidates that tie with one of the best follow, then all others,
/// each with the reason. The ranks of sp are neighbours or, on some meshes, those of tp. The
/// problem's specs are ignored. The backward pass takes the fastest schedule on the same mesh and
/// layout. Throws UserErrors for errors on every mesh, such as an unknown implementation.
[[nodiscard]] std::vector<Recommendation> recommend(const AttentionOptions& problem,
                                                    const WantedRanks& wanted,
                                                    const Registry& registry);

/// The same, with the implementations of the library.
[[nodiscard]] std::vector<Recommendation> recommend(const AttentionOptions& problem,
                                                    const WantedRanks& wanted);

/// The plan of a forward pass for ranks that need not exist, and its predicted run.
struct PlannedAttention {
  Plan plan;  ///< of all ranks of a small mesh, of sampled ranks of a large one
  ScheduleChoice schedule;
  std::string transport;
  PredictedRun run;
};

/// Plans attention with these options for a mesh of ranks at `place`. `nodes` must divide the
/// number of ranks; consecutive ranks share a node. Ignores tuning and overlays. Throws the
/// same UserErrors as Attention.
[[nodiscard]] PlannedAttention plan_attention(const AttentionOptions& options,
                                              const MeshShape& mesh, Place place, int nodes = 1);

}  // namespace annulus::ring
