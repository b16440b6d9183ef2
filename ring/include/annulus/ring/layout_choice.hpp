#pragma once

#include <string>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus {
class Context;
}

namespace annulus::ring {

/// Predicted times that differ by a smaller factor count as equal.
inline constexpr double kTie = 1.02;

/// The layouts worth comparing for a problem.
struct OpenLayouts {
  std::vector<LayoutKind> layouts;  ///< the default first
  std::string why_one;              ///< why there is only the default; empty if there are others
};

/// The sequence layouts that `asked` leaves open. Only the default (default_layout()) if no other
/// can be clearly better: without sharded sequences; with fewer than 256 rows per rank, where other
/// costs dominate; and for a mask that is causal from the first position or hides nothing, under
/// which the default gives every rank the same work. Balanced only if the default makes the work
/// uneven. Never striped, since balanced is as even, in whole tiles and with fewer messages. Throws
/// what default_layout() throws.
[[nodiscard]] OpenLayouts open_layouts(const AttentionProblem& problem, const MeshShape& mesh,
                                       const LayoutOptions& asked);

/// A sequence layout, and why.
struct LayoutChoice {
  LayoutKind layout = LayoutKind::contiguous;
  std::string why;  ///< "predicted 0.728 ms, zigzag 0.918 ms, balanced more than 0.743 ms"
};

/// The layout with the shortest predicted time of the best schedule that `problem` allows, in the
/// forward pass. The default one if it is at most 2 % slower, or if the problem names a layout for
/// its keys alone. A layout that the problem names is returned as it is. Pure.
///
/// Unlike default_layout(), which Attention uses, it depends on the machine: `node_of_rank` is as
/// in Prices, and `presence` says whether this is the machine. Throws UserErrors.
[[nodiscard]] LayoutChoice choose_layout(const AttentionOptions& problem, const MeshShape& mesh,
                                         const std::vector<int>& node_of_rank, Place place,
                                         const Registry& registry, Presence presence);

/// The choice of rank 0 for the ranks of a context, on every rank. To be set as
/// AttentionOptions::layout. Collective over the context.
[[nodiscard]] LayoutChoice choose_layout(const AttentionOptions& problem, Context& context);

}  // namespace annulus::ring
