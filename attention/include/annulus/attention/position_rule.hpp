#pragma once

#include <cstdint>
#include <limits>

#ifdef __CUDACC__
#define ANNULUS_HOST_DEVICE __host__ __device__
#else
#define ANNULUS_HOST_DEVICE
#endif

namespace annulus {

/// Visible iff low ≤ j − i ≤ high, for query position i and key position j.
struct Band {
  static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
  std::int64_t low = -kUnlimited;
  std::int64_t high = kUnlimited;
  [[nodiscard]] bool limited() const { return low != -kUnlimited || high != kUnlimited; }
};

/// The keys that a row sees by its position: [0, opening) and [begin, end), in this order and
/// disjoint.
struct KeySpans {
  std::int64_t opening = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// The parts of a mask that compare positions, applied to global positions: a row sees the keys
/// before `prefix_end`, the keys before `sink_end` that causal shows, and the keys in its band and
/// its chunk. Host and device code use it.
struct PositionRule {
  Band band;                               ///< causal and window
  std::int64_t causal = Band::kUnlimited;  ///< causal alone: j − i ≤ causal
  std::int64_t prefix_end = 0;
  std::int64_t sink_end = 0;
  std::int64_t chunk = 0;   ///< keys of a chunk; 0: no chunks
  std::int64_t origin = 0;  ///< the key at which chunk 0 starts
  std::int64_t offset = 0;  ///< row i is in the chunk of key i + offset

  [[nodiscard]] ANNULUS_HOST_DEVICE std::int64_t chunk_of_key(std::int64_t key) const {
    const std::int64_t distance = key - origin;
    return distance / chunk - (distance % chunk < 0 ? 1 : 0);
  }
  [[nodiscard]] ANNULUS_HOST_DEVICE std::int64_t chunk_of_row(std::int64_t row) const {
    return chunk_of_key(row + offset);
  }

  [[nodiscard]] ANNULUS_HOST_DEVICE KeySpans keys_of(std::int64_t row) const {
    const std::int64_t unlimited = Band::kUnlimited;
    std::int64_t opening = sink_end;
    if (causal != unlimited && row + causal + 1 < opening) opening = row + causal + 1;
    if (opening < prefix_end) opening = prefix_end;
    std::int64_t begin = opening;
    std::int64_t end = unlimited;
    if (band.low != -unlimited && row + band.low > begin) begin = row + band.low;
    if (band.high != unlimited) end = row + band.high + 1;
    if (chunk > 0) {
      const std::int64_t first = origin + chunk_of_row(row) * chunk;
      if (first > begin) begin = first;
      if (first + chunk < end) end = first + chunk;
    }
    return {opening, begin, end < begin ? begin : end};
  }
};

/// The origin of positions in a batch row, or in one of its documents, and the alignment of queries
/// and keys.
struct PositionFrame {
  std::int64_t query_begin = 0;
  std::int64_t key_begin = 0;
  std::int64_t offset = 0;  ///< of the diagonal, inside the frame
  std::int64_t prefix = 0;  ///< keys of the frame
};

/// The parts of a mask that compare positions, as a caller states them. Offsets and prefixes, which
/// may differ by batch, are values of the frames.
struct PositionParts {
  bool causal = false;
  std::int64_t window_left = -1;   ///< −1: unlimited
  std::int64_t window_right = -1;  ///< −1: unlimited
  std::int64_t sink_tokens = 0;
  std::int64_t chunk = 0;  ///< 0: none

  [[nodiscard]] bool window() const { return window_left >= 0 || window_right >= 0; }
  /// True if anything is hidden by its position.
  [[nodiscard]] bool limited() const { return causal || window() || chunk > 0; }

  [[nodiscard]] ANNULUS_HOST_DEVICE PositionRule rule(const PositionFrame& frame) const {
    PositionRule rule;
    rule.origin = frame.key_begin;
    rule.offset = frame.offset + frame.key_begin - frame.query_begin;
    if (window_left >= 0) rule.band.low = rule.offset - window_left;
    if (window_right >= 0) rule.band.high = rule.offset + window_right;
    if (causal) {
      rule.causal = rule.offset;
      if (rule.band.high > rule.offset) rule.band.high = rule.offset;
    }
    rule.prefix_end = frame.key_begin + frame.prefix;
    rule.sink_end = frame.key_begin + sink_tokens;
    rule.chunk = chunk;
    return rule;
  }
};

/// The frame of a document. Document d starts at entry d of the queries' and of the keys'
/// cu_seqlens.
[[nodiscard]] ANNULUS_HOST_DEVICE inline PositionFrame frame_of_document(
    const std::int32_t* query_cu_seqlens, const std::int32_t* kv_cu_seqlens, std::int64_t document,
    bool bottom_right, std::int64_t prefix) {
  const std::int64_t query_begin = query_cu_seqlens[document];
  const std::int64_t key_begin = kv_cu_seqlens[document];
  const std::int64_t longer =
      (kv_cu_seqlens[document + 1] - key_begin) - (query_cu_seqlens[document + 1] - query_begin);
  return {query_begin, key_begin, bottom_right ? longer : 0, prefix};
}

}  // namespace annulus
