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

/// A sequence layout, and why.
struct LayoutChoice {
  LayoutKind layout = LayoutKind::contiguous;
  std::string why;  ///< "predicted 0.728 ms, zigzag 0.918 ms, balanced more than 0.743 ms"
};

/// The layout with the shortest predicted time of the best schedule that `problem` allows, in the
/// forward pass, for the ranks of a context; rank 0 chooses. The default one, which Attention takes
/// by itself, if it is at most 2 % slower, or if the problem names a layout for its keys alone; a
/// layout that the problem names is returned as it is. To be set as AttentionOptions::layout.
/// Collective over the context. Throws UserErrors.
[[nodiscard]] LayoutChoice choose_layout(const AttentionOptions& problem, Context& context);

/// The ranks to find the best mesh for. They need not exist.
struct WantedRanks {
  int ranks = 1;
  int nodes = 1;            ///< a divisor of `ranks`; consecutive ranks share a node
  double memory_bytes = 0;  ///< limit for a rank's shards and buffers; 0: no limit
  Place place = {};         ///< the device of each
  std::string sequence_axis = "sp";
  std::optional<MeshShape> mesh = {};  ///< the only mesh, of as many ranks; default: all meshes
  int most_head_shards = 0;            ///< the largest size of tp; 0: no limit
};

/// A way to compute a problem: a mesh, a layout and a schedule.
struct Recommendation {
  std::string mesh;                       ///< "tp=2,sp=4"
  int head_shards = 1;                    ///< the ranks that the heads are divided among
  std::optional<LayoutKind> layout = {};  ///< of the sequence; none where it is whole
  /// None where the problem cannot be laid on the mesh.
  std::optional<ScheduleVariant> variant = {};
  std::string transport;
  std::string why_not;   ///< why it is not recommended; empty if it is
  bool ties = false;     ///< it is as fast as one that is recommended
  bool is_slow = false;  ///< it can run and fits, but others are faster
  double least = 0;      ///< lower bound of total() in seconds; 0 if not known
  PredictedRun run;      ///< 0 seconds: it was not simulated
  /// Seconds of the all-reduce that a model's output projection needs where heads are divided:
  /// sums of [B,T,N·Dv] in the problem's dtype, over the ranks of a group.
  double projection = 0;
  double rate = 0;  ///< operations of attention per second and rank

  [[nodiscard]] double total() const { return run.seconds + projection; }
};

/// Compares meshes dp × tp × sp with every sequence layout and schedule that `problem` leaves open,
/// by total() and memory: see docs/planning.md. Returns the best for each number of head shards,
/// the fastest first, or of several that tie with it, the one with fewest head shards; then what
/// ties with one of them, then the others, with the reason. Ranks of sp, or else of tp, are
/// neighbours. Specs of the problem are not used. Throws UserErrors for what fits no mesh, such as
/// an unknown implementation.
[[nodiscard]] std::vector<Recommendation> recommend(const AttentionOptions& problem,
                                                    const WantedRanks& wanted,
                                                    const Registry& registry);

/// The same among the implementations of the library.
[[nodiscard]] std::vector<Recommendation> recommend(const AttentionOptions& problem,
                                                    const WantedRanks& wanted);

/// A forward pass as it would be on ranks that need not exist.
struct PlannedAttention {
  Plan plan;  ///< of the sampled ranks; of all ranks of a small mesh
  ScheduleChoice schedule;
  std::string transport;
  PredictedRun run;
};

/// Plans attention with these options for a mesh of ranks at `place`. The ranks of each of the
/// `nodes`, a divisor of their number, follow each other. Throws the UserErrors that Attention
/// would throw. Tuning and overlays are not looked at.
[[nodiscard]] PlannedAttention plan_attention(const AttentionOptions& options,
                                              const MeshShape& mesh, Place place, int nodes = 1);

}  // namespace annulus::ring
