#include "balance/assign_chunks.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

#include <annulus/core/division.hpp>

namespace annulus::ring {
namespace {

// An arc whose work is off by less than this may be chosen for cheaper cuts. It is a share of a
// rank's work, summed over all splits that lead to the rank.
constexpr double kTolerance = 0.01;
// Ranks that exceed the mean by more than this share exchange chunks.
constexpr double kUneven = 0.01;
constexpr std::size_t kMaximumExchanges = 1024;  // and at most one per rank
constexpr std::size_t kMaximumPartners = 16;     // of the rank with most work; least work first
// The cost of an additional range, as a share of a rank's work.
constexpr double kRangeWorth = 0.0005;
// The cost of sending a whole sequence across cuts, as a share of a rank's work.
constexpr double kSendingWorth = 0.01;

using Set = std::vector<std::int64_t>;  // chunks, ascending

class Splitter {
 public:
  Splitter(const Chunks& chunks, int ranks)
      : chunks_(chunks),
        last_(ceil_divide(chunks.length, chunks.granule) - 1),
        ragged_(chunks.length % chunks.granule != 0) {
    for (const auto& work : chunks.work) {
      double total = 0;
      for (const std::int64_t one : work) total += static_cast<double>(one);
      unit_ = std::max(unit_, total / ranks);
    }
    tolerance_ = kTolerance / std::max(1.0, std::ceil(std::log2(ranks)));
  }

  // `larger` of the ranks get one chunk more than the others.
  void split(Set set, int ranks, std::int64_t larger) {
    if (ranks == 1 || set.empty()) {
      sets_.push_back(std::move(set));
      sets_.resize(sets_.size() + static_cast<std::size_t>(ranks) - 1);
      return;
    }
    const int first = ranks / 2;
    const Arc arc = best_arc(set, ranks, larger);
    Set inside;
    Set outside;
    for (std::size_t i = 0; i < set.size(); ++i) {
      (arc.holds(static_cast<std::int64_t>(i), size_of(set)) ? inside : outside).push_back(set[i]);
    }
    split(std::move(inside), first, arc.larger);
    split(std::move(outside), ranks - first, larger - arc.larger);
  }

  [[nodiscard]] std::vector<Set> take_sets() { return std::move(sets_); }

 private:
  /// Elements [begin, begin + count) of a set, wrapping around at its end.
  struct Arc {
    std::int64_t begin = 0;
    std::int64_t count = 0;
    std::int64_t larger = 0;  ///< ranks inside that get one chunk more
    [[nodiscard]] bool holds(std::int64_t index, std::int64_t size) const {
      return (index - begin + size) % size < count;
    }
  };

  static std::int64_t size_of(const Set& set) { return static_cast<std::int64_t>(set.size()); }

  // The work of a set before each element, by group.
  [[nodiscard]] std::vector<std::vector<std::int64_t>> sums_of(const Set& set) const {
    std::vector<std::vector<std::int64_t>> sums;
    for (const auto& work : chunks_.work) {
      std::vector<std::int64_t>& sum = sums.emplace_back(1, 0);
      for (const std::int64_t chunk : set) {
        sum.push_back(sum.back() + work[static_cast<std::size_t>(chunk)]);
      }
    }
    return sums;
  }

  // The cost of a cut before an element; 0 where the set has a gap, as there is nothing to cut.
  [[nodiscard]] double cut_cost(const Set& set, std::int64_t index) const {
    const auto at = static_cast<std::size_t>(index % size_of(set));
    if (at == 0 || set[at - 1] + 1 != set[at]) return 0;
    return chunks_.cut_cost.empty() ? 0 : chunks_.cut_cost[static_cast<std::size_t>(set[at])];
  }

  // The last chunk may be short, so it must go to a rank that gets one chunk more than others.
  [[nodiscard]] bool permits(const Arc& arc, const Set& set, std::int64_t larger) const {
    if (!ragged_ || larger == 0 || set.back() != last_) return true;
    return (arc.holds(size_of(set) - 1, size_of(set)) ? arc.larger : larger - arc.larger) > 0;
  }

  template <class Visit>
  void for_each_arc(const Set& set, int ranks, std::int64_t larger, const Visit& visit) const {
    const int first = ranks / 2;
    const std::int64_t each = (size_of(set) - larger) / ranks;
    const std::int64_t rounded_down = larger * first / ranks;
    for (const std::int64_t inside : {rounded_down, rounded_down + 1}) {
      if (inside > rounded_down && larger * first % ranks == 0) break;
      Arc arc{0, each * first + inside, inside};
      const std::int64_t begins = arc.count == 0 ? 1 : size_of(set);
      for (; arc.begin < begins; ++arc.begin) {
        if (permits(arc, set, larger)) visit(arc);
      }
    }
  }

  [[nodiscard]] Arc best_arc(const Set& set, int ranks, std::int64_t larger) const {
    const auto sums = sums_of(set);
    const int first = ranks / 2;
    const auto off_by = [&](const Arc& arc) {
      double most = 0;
      for (const std::vector<std::int64_t>& sum : sums) {
        const auto at = [&](std::int64_t index) { return sum[static_cast<std::size_t>(index)]; };
        const std::int64_t end = arc.begin + arc.count;
        const std::int64_t inside = end <= size_of(set)
                                        ? at(end) - at(arc.begin)
                                        : sum.back() - at(arc.begin) + at(end - size_of(set));
        const double share = static_cast<double>(sum.back()) * first / ranks;
        most = std::max(most, std::abs(static_cast<double>(inside) - share));
      }
      return unit_ > 0 ? most / (unit_ * first) : 0;
    };
    double least = std::numeric_limits<double>::infinity();
    for_each_arc(set, ranks, larger, [&](const Arc& arc) { least = std::min(least, off_by(arc)); });

    Arc best;
    double best_score = std::numeric_limits<double>::infinity();
    for_each_arc(set, ranks, larger, [&](const Arc& arc) {
      const double off = off_by(arc);
      if (off > std::max(least, tolerance_)) return;
      const double cuts = cut_cost(set, arc.begin) + cut_cost(set, arc.begin + arc.count);
      const double score = off + kSendingWorth * cuts;
      if (score >= best_score) return;
      best_score = score;
      best = arc;
    });
    return best;
  }

  const Chunks& chunks_;
  std::int64_t last_;
  bool ragged_;
  double unit_ = 0;  // the mean work of a rank, in the group with most
  double tolerance_;
  std::vector<Set> sets_;
};

// Exchanges single chunks between ranks.
class Mender {
 public:
  Mender(const Chunks& chunks, std::vector<Set>& sets)
      : chunks_(chunks), sets_(sets), owner_(1 + chunks.work.front().size() + 1, -1) {
    for (const Set& set : sets) {
      std::vector<double>& loads = loads_.emplace_back();
      for (const std::vector<std::int64_t>& work : chunks.work) {
        double load = 0;
        for (const std::int64_t chunk : set) load += static_cast<double>(at(work, chunk));
        loads.push_back(load);
      }
      for (const std::int64_t chunk : set) owner(chunk) = static_cast<int>(loads_.size()) - 1;
    }
    for (std::size_t group = 0; group < chunks.work.size(); ++group) {
      double total = 0;
      for (const std::vector<double>& loads : loads_) total += loads[group];
      unit_ = std::max(unit_, total / static_cast<double>(sets.size()));
    }
  }

  void mend() {
    const std::size_t most = std::min(sets_.size(), kMaximumExchanges);
    for (std::size_t i = 0; i < most && exchange_one(); ++i) continue;
  }

 private:
  /// Chunk `mine` of the rank with most work for chunk `other` of a rank with less.
  struct Exchange {
    std::size_t mine = 0, other = 0;  ///< indices into their sets
    double score = std::numeric_limits<double>::infinity();
  };

  static std::int64_t at(const std::vector<std::int64_t>& values, std::int64_t index) {
    return values[static_cast<std::size_t>(index)];
  }
  // −1 before the first chunk and after the last.
  [[nodiscard]] int& owner(std::int64_t chunk) {
    return owner_[static_cast<std::size_t>(chunk + 1)];
  }
  [[nodiscard]] int owner(std::int64_t chunk) const {
    return owner_[static_cast<std::size_t>(chunk + 1)];
  }
  [[nodiscard]] std::vector<double>& loads_of(int rank) {
    return loads_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] const std::vector<double>& loads_of(int rank) const {
    return loads_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] static double most_of(const std::vector<double>& loads) {
    return *std::max_element(loads.begin(), loads.end());
  }

  // The change in the number of ranges if a chunk goes to another rank.
  [[nodiscard]] int more_ranges(std::int64_t chunk, int to) const {
    int borders = 0;
    for (const std::int64_t neighbour : {chunk - 1, chunk + 1}) {
      borders += owner(neighbour) == owner(chunk) ? 1 : 0;
      borders -= owner(neighbour) == to ? 1 : 0;
    }
    return borders;
  }

  [[nodiscard]] Exchange best_exchange(int most, int least) const {
    const std::vector<double>& heavy = loads_of(most);
    const std::vector<double>& light = loads_of(least);
    const Set& mine = sets_[static_cast<std::size_t>(most)];
    const Set& other = sets_[static_cast<std::size_t>(least)];
    const bool ragged = chunks_.length % chunks_.granule != 0;
    const auto last = static_cast<std::int64_t>(owner_.size()) - 3;
    const double bound = most_of(heavy) - kRangeWorth * unit_;
    Exchange best;
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (ragged && mine[i] == last) continue;  // the sizes of ranks must not change
      for (std::size_t j = 0; j < other.size(); ++j) {
        if (ragged && other[j] == last) continue;
        double worst = 0;
        for (std::size_t group = 0; group < heavy.size(); ++group) {
          const double more = static_cast<double>(at(chunks_.work[group], mine[i]) -
                                                  at(chunks_.work[group], other[j]));
          worst = std::max({worst, heavy[group] - more, light[group] + more});
        }
        if (worst >= bound) continue;
        const int ranges = more_ranges(mine[i], least) + more_ranges(other[j], most);
        const double score = worst + kRangeWorth * unit_ * ranges;
        if (score < best.score) best = {i, j, score};
      }
    }
    return best;
  }

  // Makes one exchange. Returns false if none helps.
  bool exchange_one() {
    const auto less = [&](int a, int b) {
      return std::pair(most_of(loads_of(a)), a) < std::pair(most_of(loads_of(b)), b);
    };
    std::vector<int> ranks(loads_.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    const int heavy = *std::max_element(ranks.begin(), ranks.end(), less);
    if (most_of(loads_of(heavy)) <= (1 + kUneven) * unit_) return false;
    const std::size_t partners = std::min(ranks.size() - 1, kMaximumPartners);
    std::partial_sort(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(partners),
                      ranks.end(), less);
    for (std::size_t i = 0; i < partners; ++i) {
      const int light = ranks[i];
      const Exchange best = best_exchange(heavy, light);
      if (std::isinf(best.score)) continue;
      exchange(heavy, light, best);
      return true;
    }
    return false;
  }

  void exchange(int heavy, int light, const Exchange& what) {
    std::int64_t& mine = sets_[static_cast<std::size_t>(heavy)][what.mine];
    std::int64_t& other = sets_[static_cast<std::size_t>(light)][what.other];
    for (std::size_t group = 0; group < chunks_.work.size(); ++group) {
      const double more =
          static_cast<double>(at(chunks_.work[group], mine) - at(chunks_.work[group], other));
      loads_of(heavy)[group] -= more;
      loads_of(light)[group] += more;
    }
    std::swap(owner(mine), owner(other));
    std::swap(mine, other);
  }

  const Chunks& chunks_;
  std::vector<Set>& sets_;
  std::vector<int> owner_;                  // by chunk + 1
  std::vector<std::vector<double>> loads_;  // by rank and group
  double unit_ = 0;                         // the mean work of a rank, in the group with most
};

PositionRanges positions_of(const Set& set, const Chunks& chunks) {
  std::vector<PositionRange> ranges;
  for (const std::int64_t chunk : set) {
    const GlobalPosition begin(chunk * chunks.granule);
    const std::int64_t length = std::min(chunks.granule, chunks.length - begin.value());
    if (!ranges.empty() && ranges.back().last() + 1 == begin) {
      ranges.back().length += length;
    } else {
      ranges.push_back({begin, length, 1});
    }
  }
  return PositionRanges(std::move(ranges));
}

}  // namespace

Assignment assign_chunks(const Chunks& chunks, int ranks) {
  Set all(static_cast<std::size_t>(ceil_divide(chunks.length, chunks.granule)));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
  const std::int64_t larger = static_cast<std::int64_t>(all.size()) % ranks;
  Splitter splitter(chunks, ranks);
  splitter.split(std::move(all), ranks, larger);
  std::vector<Set> sets = splitter.take_sets();
  Mender(chunks, sets).mend();
  for (Set& set : sets) std::sort(set.begin(), set.end());
  // Ranks are in order of their first positions; ranks without positions come last.
  std::sort(sets.begin(), sets.end(), [](const Set& a, const Set& b) {
    return !a.empty() && (b.empty() || a.front() < b.front());
  });
  std::vector<PositionRanges> by_rank;
  for (const Set& set : sets) by_rank.push_back(positions_of(set, chunks));
  return Assignment(std::move(by_rank));
}

}  // namespace annulus::ring
