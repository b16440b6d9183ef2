#pragma once

#include <string>
#include <vector>

#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/sharded_attention.hpp>
#include <annulus/ring/tuning_cache.hpp>

#include "tuning/choice.hpp"

namespace annulus::ring {

/// The machines that ranks compute with.
struct Machine {
  std::vector<std::string> devices;  ///< names, each once, in order
  /// The nodes of the ranks, in order: "0 x 8, 1 x 8"; if nodes are emulated (ANNULUS_NODE), their
  /// machines too.
  std::string nodes;
  std::string versions;      ///< of the loaded libraries
  bool shares_gpus = false;  ///< several ranks use one GPU
  int threads = 1;           ///< of a rank's kernels, on CPUs
};

/// Collective over the mesh.
[[nodiscard]] Machine machine_of(Mesh& mesh, Place place, int threads);

/// The inputs of a measurement, the caller's own choices, and the limits of the candidates.
/// `schedule` is the one that the options resolve to, or "auto". The mask counts by its kind and by
/// the share of visible pairs, to the nearest power of two, so other documents or lengths of the
/// same kind have the same key. Scales, seeds and contents of tensors do not count.
[[nodiscard]] TuningKey make_tuning_key(const PlanInput& input,
                                        const ShardedAttentionOptions& options,
                                        const std::string& schedule, const OpenChoices& open,
                                        const Machine& machine);

}  // namespace annulus::ring
