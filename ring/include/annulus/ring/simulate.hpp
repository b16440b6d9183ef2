#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <annulus/core/trace.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/prices.hpp>

namespace annulus::ring {

/// Predicted seconds of one rank.
struct RankTimeline {
  double compute = 0;   ///< copies, blocks and reductions
  double transfer = 0;  ///< with messages on their way, hidden or not
  double exposed = 0;   ///< waiting for messages with nothing to compute
  double finish = 0;
};

/// Ranks that compute more slowly than the prices say: each takes longer by a share drawn uniformly
/// between 0 and `most`. The draw depends only on the seed and the rank.
struct Stragglers {
  std::uint64_t seed = 0;
  double most = 0;  ///< 0.05: up to 5 % longer

  /// The factor by which a rank computes slower.
  [[nodiscard]] double factor(int rank) const;
};

/// Simulates the execution of plans by discrete events. As in the runner, the tasks that compute
/// run in the order of the list, and so do the exchanges of a group, each once its dependencies are
/// met.
///
/// A transfer starts when both sides are ready; with a one-sided transport, when the receiver is
/// ready and the sender has offered. If the transport does not move messages ahead, it also waits
/// for the computation that precedes it in the list. The messages that a rank gets in one exchange
/// follow each other, separately for messages inside the node and from other nodes. If the
/// transport starts messages together (NCCL's groups), messages from other nodes all move at the
/// same time.
///
/// Links are shared. A rank has one link in each direction to the ranks of its node and one to
/// other nodes; the ranks of a node share what the node's network carries. A message alone on its
/// links takes as long as CostModel says; messages that overload a link slow down alike. Transports
/// that need multiprocessors slow a rank's kernels down while its messages move; copy engines do
/// not.
///
/// A rank that is left out keeps the pace of a simulated one: the nearest that has the same place
/// in its node. It takes part in an exchange once that rank has come as far. It loads the network
/// of its node as much as a simulated rank of the node does. Its own links limit nothing.
class Simulation {
 public:
  /// `prices` must outlive it. `plan` names the plan in errors: "hybrid (ulysses degree 8)".
  Simulation(const Prices& prices, std::string plan, const Stragglers& stragglers = {});
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  /// Adds a rank, each once. The plan is not needed afterwards. `record`: see spans(). Returns a
  /// lower bound of the simulated time: see least_seconds().
  double add(const RankPlan& rank, bool record = false);
  /// Adds a rank that has the plan of the `index`-th added rank, except for the numbers of ranks:
  /// all ranks of its groups differ by the same amount as the rank itself.
  void add_alike(std::size_t index, int rank);
  /// To be called once. Returns the timelines in the order in which the ranks were added; none as
  /// soon as the simulated time exceeds `limit` seconds. Throws InternalError, which says how far a
  /// rank has come, if tasks wait for each other forever.
  [[nodiscard]] std::vector<RankTimeline> run(
      double limit = std::numeric_limits<double>::infinity());
  /// The spans of the `index`-th rank, as in a traced run: computing and waiting on the stream
  /// "compute", messages on "communication". The simulation begins at 0 ns. Empty unless the rank
  /// was recorded.
  [[nodiscard]] const std::vector<TraceSpan>& spans(std::size_t index) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// The timelines of all ranks of a plan.
[[nodiscard]] std::vector<RankTimeline> simulate(const Plan& plan, const Prices& prices);

/// A lower bound for the simulated time of this rank's plan: its computation, and the load of each
/// of its links, without any waiting.
[[nodiscard]] double least_seconds(const RankPlan& rank, const Prices& prices);

/// The finish of the slowest rank.
[[nodiscard]] double predicted_seconds(const Plan& plan, const Prices& prices);

}  // namespace annulus::ring
