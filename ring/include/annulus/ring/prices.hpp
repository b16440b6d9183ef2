#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/place.hpp>
#include <annulus/ring/cost_model.hpp>

namespace annulus {
class Control;
}  // namespace annulus

namespace annulus::ring {

/// A cost model applied to one problem, which turns its plans into time.
struct Prices {
  CostModel model;  ///< of merging and messages
  /// By the implementation's name.
  std::map<std::string, KernelCost> kernels;
  /// The node of each rank of the mesh, as Topology::node_of_rank; empty: all share one.
  std::vector<int> node_of_rank = {};

  /// The sources of the kernels' costs: "native assumed, sdpa measured".
  [[nodiscard]] std::string knowledge() const;
  /// Throws InternalError for an implementation that has no price.
  [[nodiscard]] const KernelCost& kernel(const std::string& implementation) const;
  [[nodiscard]] int node_of(int rank) const {
    return node_of_rank.empty() ? 0 : node_of_rank[static_cast<std::size_t>(rank)];
  }
  /// Ranks of the mesh on a node; 0 if all are on one.
  [[nodiscard]] int ranks_on(int node) const {
    return static_cast<int>(std::count(node_of_rank.begin(), node_of_rank.end(), node));
  }
};

/// Gives all ranks the same prices of kernels, the highest of any rank, so that they make the same
/// plans even if their CPUs or numbers of threads differ. Collective; ranks must agree on the
/// implementations and on the cost model, except for its threads.
void share_prices(Prices& prices, Control& ranks);

/// The prices of these implementations for the class of a pass of `problem` (class_of()). Each
/// price is the first in this list that exists:
///
/// 1. The price measured for the class.
/// 2. The price measured for the nearest class, scaled by the assumed rates of the two classes. The
///    nearest class has the same dtype, or else one of as many bytes; then the same
///    pass; then the most similar D + Dv; then the same kind of mask; then a soft cap if the
///    problem has one.
/// 3. The assumed rate of the implementation at `place`, scaled by the measured over the assumed
///    rate of another kernel: the one of the nearest class; of several, the one with the most
///    similar assumed rate.
/// 4. The assumed rate of the implementation at `place`.
///
/// An assumed rate of a CPU is the rate of one thread, times the threads of the model.
///
/// Throws ArgumentError for a model of ranks that compute on another kind of device.
[[nodiscard]] Prices make_prices(CostModel model, const AttentionProblem& problem,
                                 const std::vector<const Implementation*>& candidates, Place place,
                                 Pass pass = Pass::forward);

}  // namespace annulus::ring
