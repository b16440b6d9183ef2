#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <annulus/core/place.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus {
class Registry;
}

namespace annulus::ring {

/// The ranks to find the best mesh for. They need not exist.
struct WantedRanks {
  int ranks = 1;
  int nodes = 1;            ///< a divisor of `ranks`; consecutive ranks share a node
  double memory_bytes = 0;  ///< limit for a rank's shards and buffers; 0: no limit
  Place place = {};         ///< the device of each
  std::string sequence_axis = "sp";
};

/// A way to compute a problem: a mesh, a layout and a schedule.
struct Recommendation {
  std::string mesh;                       ///< "dp=1,tp=2,sp=4"
  std::optional<LayoutKind> layout = {};  ///< of the sequence; none where it is whole
  /// None where the problem cannot be laid on the mesh.
  std::optional<ScheduleVariant> variant = {};
  std::string transport;
  std::string why_not;   ///< why it is not recommended; empty if it is
  bool is_slow = false;  ///< not simulated: others take less than its lower bound
  double least = 0;      ///< lower bound in seconds; 0 if not known
  PredictedRun run;      ///< 0 seconds: it was not simulated
  double rate = 0;       ///< operations per second and rank
};

struct Recommendations {
  /// Best first, then candidates that are not recommended, with the reason.
  std::vector<Recommendation> all;
  /// The number of sampled ranks, of the layout with most.
  std::size_t most_planned = 0;
};

/// The most candidates that are simulated and listed.
inline constexpr std::size_t kRecommended = 20;

/// Compares meshes dp × tp × sp with every sequence layout and schedule that `problem` leaves open,
/// by predicted time and memory: see docs/planning.md. Specs of the problem are not used. Throws
/// UserErrors for what fits no mesh, such as an unknown implementation.
[[nodiscard]] Recommendations recommend(const AttentionOptions& problem, const WantedRanks& wanted,
                                        const Registry& registry);

/// The same among the implementations of the library.
[[nodiscard]] Recommendations recommend(const AttentionOptions& problem, const WantedRanks& wanted);

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
