#pragma once

#include <cstdint>
#include <vector>

#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// Query heads that one rank computes at once, and the key/value heads that they read: whole groups
/// of query heads, or a part of one group.
struct HeadShare {
  HeadRange heads;
  HeadRange kv_heads;
  bool operator==(const HeadShare&) const = default;
};

/// Distributes `heads` query heads over `ranks`, evenly to within one head. By rank: its heads, cut
/// into about `pieces` shares.
[[nodiscard]] std::vector<std::vector<HeadShare>> share_heads(std::int64_t heads,
                                                              std::int64_t kv_heads, int ranks,
                                                              int pieces);
/// Distributes the key/value heads, each with all of its query heads, in at most one share a rank.
[[nodiscard]] std::vector<std::vector<HeadShare>> share_whole_groups(std::int64_t heads,
                                                                     std::int64_t kv_heads,
                                                                     int ranks);

}  // namespace annulus::ring
