#pragma once

#include <cstdint>
#include <vector>

#include <annulus/partition/sequence_layout.hpp>

namespace annulus::ring {

/// A sequence in chunks of `granule` positions, and the work of each. The last chunk may be
/// shorter.
struct Chunks {
  std::int64_t length = 0;
  std::int64_t granule = 1;
  /// [groups][chunks]: each group of ranks computes all chunks for its own batches.
  std::vector<std::vector<std::int64_t>> work;
  /// [chunks]: the cost of a cut before a chunk, as the share of the sequence that has to be sent
  /// across it; empty if cuts cost nothing.
  std::vector<double> cut_cost;
};

/// Assigns the chunks so that all ranks get about the same work, in few ranges, and sizes that
/// differ by at most one granule. Pure; the result is the same on every machine with IEEE 754
/// arithmetic.
///
/// To split a set of chunks among P ranks, its ends are joined to form a circle. P₁ = ⌊P/2⌋ of the
/// ranks get an arc of P₁/P of its length. The mean work of all arcs of that length is P₁/P of the
/// whole, and neighbouring arcs differ by at most one chunk at each end. So some arc has that work,
/// up to a chunk (Alon's necklace splitting, for two thieves at a time). The other ranks get the
/// rest, and both parts are split further. Each split cuts twice, so there are at most 2P − 1
/// ranges. A plain causal mask becomes zigzag in this way.
///
/// Exchanges of single chunks then even out what remains. As long as the rank with most work is
/// more than 1 % above the mean, it exchanges one chunk with a rank that has little, at most P
/// times. So there are fewer than 6P ranges.
///
/// With several groups, the worst one counts, since no arc may suit all of them.
[[nodiscard]] Assignment assign_chunks(const Chunks& chunks, int ranks);

}  // namespace annulus::ring
