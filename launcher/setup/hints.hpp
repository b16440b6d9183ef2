#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/sharded_operands.hpp>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// Hints about legal but suspicious options: axes that shard nothing, a causal mask that hides the
/// last keys from every query, files whose heads and positions look swapped. One sentence each,
/// with a remedy. Throws UserError for such files unless --layout names their order.
[[nodiscard]] std::vector<std::string> hints(const Options& options, const AttentionShape& shape,
                                             const MeshShape& mesh,
                                             const ring::OperandLayout& layout);

/// More heads than this look like a mistake.
inline constexpr std::int64_t kMaximumHeads = 256;

/// Warnings about options of the command line that the choice of `auto` leaves without effect.
/// `chosen`: the schedules of all passes; `rounds_gradients`: whether the backward pass sends
/// rounded parts of gradients, absent if that is unknown or there is none.
[[nodiscard]] std::vector<std::string> hints_of_choice(const Options& options,
                                                       const std::vector<ring::Schedule>& chosen,
                                                       std::optional<bool> rounds_gradients = {});

/// "; mpirun -n 4 annulus run ... has as many as this mesh", if --mesh is right except for the
/// number of ranks; else nothing.
[[nodiscard]] std::string hint_of_ranks(const Options& options, int ranks);

}  // namespace annulus::launcher
