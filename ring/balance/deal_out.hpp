#pragma once

#include <cstdint>
#include <vector>

#include <annulus/partition/dealing.hpp>

namespace annulus::ring {

/// A sequence in chunks of `granule` positions, the last of which may be shorter, and their work.
struct Chunks {
  std::int64_t length = 0;
  std::int64_t granule = 1;
  /// [groups][chunks]: each group of ranks computes all chunks, for batches of its own.
  std::vector<std::vector<std::int64_t>> work;
  /// [chunks]: what a cut before a chunk costs, as a part of the sequence that has to be sent
  /// across it; empty if cuts cost nothing.
  std::vector<double> cut_cost;
};

/// Deals the chunks out so that all ranks get the same work, in few ranges, and sizes that differ
/// by at most one granule. Pure; the same on every machine that rounds like IEEE 754.
///
/// A set of chunks that is to be split among P ranks is bent to a circle, and P₁ = ⌊P/2⌋ of them
/// get an arc of P₁/P of its length. Over all arcs of that length the mean of their work is P₁/P of
/// the whole, and between neighbouring arcs it changes by one chunk at most: so some arc has that
/// work, but for a chunk (Alon's necklaces, for two thieves at a time). The other ranks get the
/// rest, and both parts are split on. Each split cuts twice, which makes 2P − 1 ranges at most. A
/// plain causal mask becomes zigzag in this way.
///
/// What single chunks leave uneven is then mended: the rank with most work and the one with least
/// exchange a chunk each, as long as the first is 1 % above the mean, P times at most. So there are
/// fewer than 6P ranges.
///
/// Of several groups, the one that is farthest off counts; arcs that suit them all need not exist.
[[nodiscard]] Dealing deal_out(const Chunks& chunks, int ranks);

}  // namespace annulus::ring
