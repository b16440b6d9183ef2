#include "schedules/building/head_shares.hpp"

#include <algorithm>

#include <annulus/core/division.hpp>

namespace annulus::ring {

std::vector<std::vector<HeadShare>> share_heads(std::int64_t heads, std::int64_t kv_heads,
                                                int ranks, int pieces) {
  std::vector<std::vector<HeadShare>> shares(static_cast<std::size_t>(ranks));
  if (heads == 0) return shares;
  const std::int64_t ratio = heads / kv_heads;
  for (int rank = 0; rank < ranks; ++rank) {
    std::int64_t begin = heads * rank / ranks;
    const std::int64_t end = heads * (rank + 1) / ranks;
    const std::int64_t most = std::max<std::int64_t>(1, ceil_divide(end - begin, pieces));
    while (begin < end) {
      const std::int64_t next = std::min(end, begin + most);
      // To the end of the group that is open, or as many whole groups as there are.
      const std::int64_t boundary = (begin / ratio + 1) * ratio;
      const bool whole = begin % ratio == 0 && next >= boundary;
      const std::int64_t stop = whole ? next / ratio * ratio : std::min(next, boundary);
      shares[static_cast<std::size_t>(rank)].push_back(
          {{begin, stop - begin}, {begin / ratio, ceil_divide(stop, ratio) - begin / ratio}});
      begin = stop;
    }
  }
  return shares;
}

std::vector<std::vector<HeadShare>> share_whole_groups(std::int64_t heads, std::int64_t kv_heads,
                                                       int ranks) {
  std::vector<std::vector<HeadShare>> shares = share_heads(kv_heads, kv_heads, ranks, 1);
  for (std::vector<HeadShare>& of_rank : shares) {
    for (HeadShare& share : of_rank) {
      const std::int64_t group = heads / kv_heads;
      share.heads = {share.kv_heads.begin * group, share.kv_heads.count * group};
    }
  }
  return shares;
}

}  // namespace annulus::ring
