#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace annulus {

/// Which of the ranks can copy out of each other's memory.
enum class PeerExtent : std::uint8_t { none, some, all };

/// The ranks of a group in cliques: those of a clique all copy out of each other's memory.
struct PeerReach {
  std::vector<int> clique_of_rank;  ///< cliques count from 0, in order of their first rank
  std::string obstacle;             ///< why there is more than one: "ranks 0 and 2 are on different
                                    ///< nodes"; "" if there is only one

  /// True if messages between two ranks can go by copies.
  [[nodiscard]] bool connects(int rank, int other) const {
    return clique_of_rank.at(static_cast<std::size_t>(rank)) ==
           clique_of_rank.at(static_cast<std::size_t>(other));
  }
  /// all for a single rank.
  [[nodiscard]] PeerExtent extent() const;

  /// The findings of one rank.
  struct Finding {
    std::vector<int> reached;  ///< the other ranks whose memory it reaches
    std::string obstacle;      ///< why it does not reach the first of the rest
  };
  /// From what every rank has found out, in order of rank. Each rank joins the first clique all of
  /// whose ranks reach it and are reached by it.
  [[nodiscard]] static PeerReach from(std::span<const Finding> findings);
  /// No rank reaches another.
  [[nodiscard]] static PeerReach nowhere(int ranks, std::string obstacle);
};

/// The extent of several groups together.
[[nodiscard]] PeerExtent joint(std::span<const PeerExtent> extents);

}  // namespace annulus
