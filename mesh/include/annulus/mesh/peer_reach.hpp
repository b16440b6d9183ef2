#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace annulus {

/// The ranks that can copy out of each other's memory.
enum class PeerExtent : std::uint8_t { none, some, all };

/// The P2P cliques of a group: all ranks of a clique can copy out of each other's memory.
struct PeerReach {
  std::vector<int> clique_of_rank;  ///< cliques count from 0, in order of their first rank
  std::string obstacle;             ///< why there are several: "ranks 0 and 2 are on different
                                    ///< nodes"; "" if there is only one

  /// True if two ranks can copy messages.
  [[nodiscard]] bool connects(int rank, int other) const {
    return clique_of_rank.at(static_cast<std::size_t>(rank)) ==
           clique_of_rank.at(static_cast<std::size_t>(other));
  }
  /// all for a single rank.
  [[nodiscard]] PeerExtent extent() const;

  /// The findings of one rank.
  struct Finding {
    std::vector<int> reached;  ///< the other ranks whose memory it reaches
    std::string obstacle;      ///< why it does not reach the first other rank
  };
  /// Made from every rank's findings, in order of rank. Each rank joins the first clique whose
  /// ranks all reach it and are reached by it.
  [[nodiscard]] static PeerReach from(std::span<const Finding> findings);
  /// No rank reaches another.
  [[nodiscard]] static PeerReach nowhere(int ranks, std::string obstacle);
};

/// The extent of several groups together.
[[nodiscard]] PeerExtent joint(std::span<const PeerExtent> extents);

}  // namespace annulus
