#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/place.hpp>
#include <annulus/ring/cost_model.hpp>

namespace annulus::ring {

/// A cost model applied to one problem: what turns its plans into time.
struct Prices {
  CostModel model;  ///< of merging and messages
  /// By the implementation's name. The source says which figures these are.
  std::map<std::string, KernelCost> kernels;
  /// Which ranks of the mesh share a node, as Topology::node_of_rank; empty: all.
  std::vector<int> node_of_rank = {};

  /// How the costs of the kernels are known: "native assumed, sdpa measured".
  [[nodiscard]] std::string knowledge() const;
  /// All numbers and sources: ranks that plan together have the same.
  [[nodiscard]] std::string to_text() const;
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

/// The prices of these candidates for the class of `problem` (class_of()). In this order:
///
/// 1. what was measured for the class;
/// 2. what was measured for the nearest class, times the ratio of the rates that are assumed of the
///    two. Nearest are those of the same dtype, else those of one of the same size; of those,
///    the one whose D + Dv differs least; of those, the one whose kind of mask does; of those, one
///    that agrees in the soft cap;
/// 3. the rate that the implementation assumes at `place`, times what was measured of another
/// kernel
///    over what that one assumes: of the nearest class, and of several kernels the one that assumes
///    the most similar rate;
/// 4. the rate that the implementation assumes at `place`.
///
/// Throws ArgumentError for a model of ranks that compute on another kind of device.
[[nodiscard]] Prices make_prices(CostModel model, const AttentionProblem& problem,
                                 const std::vector<const Implementation*>& candidates, Place place);

}  // namespace annulus::ring
