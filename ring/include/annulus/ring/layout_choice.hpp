#pragma once

#include <string>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/recommend.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// Predicted times that differ by a smaller factor count as equal.
inline constexpr double kTie = 1.02;

/// The layouts worth comparing for a problem.
struct OpenLayouts {
  std::vector<LayoutKind> layouts;  ///< the default first
  std::string why_one;              ///< why there is only the default; empty if there are others
};

/// The sequence layouts that `asked` leaves open. Only the default (default_layout()) is open if no
/// other can be clearly better: if no sequence is sharded; if ranks have fewer than 256 rows, where
/// other costs dominate; or if the mask is causal from the first position or hides nothing, so that
/// the default gives every rank the same work. Balanced is open only if the default makes the work
/// uneven. Striped never is, since balanced is as even, in whole tiles and with fewer messages.
/// Throws what default_layout() throws.
[[nodiscard]] OpenLayouts open_layouts(const AttentionProblem& problem, const MeshShape& mesh,
                                       const LayoutOptions& asked);

/// The choice of choose_layout(problem, context), for ranks that need not exist. Pure.
///
/// Unlike default_layout(), which Attention uses, it depends on the machine: `node_of_rank` is as
/// in Prices, and `presence` says whether this is the machine. Throws UserErrors.
[[nodiscard]] LayoutChoice choose_layout(const AttentionOptions& problem, const MeshShape& mesh,
                                         const std::vector<int>& node_of_rank, Place place,
                                         const Registry& registry, Presence presence);

}  // namespace annulus::ring
