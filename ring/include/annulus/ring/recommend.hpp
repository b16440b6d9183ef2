#pragma once

#include <optional>
#include <string>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/layout_choice.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/predicted_run.hpp>

namespace annulus::ring {

/// The ranks to find the best mesh for. They need not exist.
struct WantedRanks {
  int ranks = 1;
  int nodes = 1;            ///< a divisor of `ranks`; consecutive ranks share a node
  double memory_bytes = 0;  ///< limit for a rank's shards and buffers; 0: no limit
  Place place;              ///< the device of each
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

}  // namespace annulus::ring
