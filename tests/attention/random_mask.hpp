#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <annulus/attention/mask.hpp>

namespace annulus::test {

using Random = std::mt19937_64;

/// Uniform in [low, high].
inline std::int64_t draw(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

enum class MaskKind : std::uint8_t {
  causal,
  offset,  // causal with an offset
  window,
  left_window,
  right_window,
  segments,   // any order, with padding
  documents,  // cu_seqlens, some empty
  query_lengths,
  kv_lengths,
  offsets,  // causal with an offset per batch
  prefix,
  prefixes,  // one per batch
  sink_tokens,
  chunk,
  packings  // two, with positions inside the documents
};

inline constexpr std::array kMaskKinds{
    MaskKind::causal,      MaskKind::offset,        MaskKind::window,
    MaskKind::left_window, MaskKind::right_window,  MaskKind::segments,
    MaskKind::documents,   MaskKind::query_lengths, MaskKind::kv_lengths};

/// Beside one band, segments and lengths.
inline constexpr std::array kPositionKinds{MaskKind::offsets,  MaskKind::prefix,
                                           MaskKind::prefixes, MaskKind::sink_tokens,
                                           MaskKind::chunk,    MaskKind::packings};

/// Each kind of positions with every other kind, and with a second one of each.
inline std::vector<std::vector<MaskKind>> position_combinations() {
  std::vector<std::vector<MaskKind>> all;
  for (const MaskKind first : kPositionKinds) {
    all.push_back({first});
    for (const MaskKind second : kPositionKinds) {
      if (second != first) all.push_back({first, second, MaskKind::causal});
      all.push_back({first, second, MaskKind::left_window});
    }
    for (const MaskKind other : kMaskKinds) {
      all.push_back({first, other});
      all.push_back({first, other, MaskKind::chunk});
      all.push_back({first, other, MaskKind::window});
    }
  }
  return all;
}

/// Every kind alone and every pair of kinds.
inline std::vector<std::vector<MaskKind>> mask_combinations() {
  std::vector<std::vector<MaskKind>> all;
  for (std::size_t i = 0; i < kMaskKinds.size(); ++i) {
    all.push_back({kMaskKinds[i]});
    for (std::size_t j = i + 1; j < kMaskKinds.size(); ++j) {
      all.push_back({kMaskKinds[i], kMaskKinds[j]});
    }
  }
  return all;
}

inline std::vector<std::vector<MaskKind>> all_combinations() {
  std::vector<std::vector<MaskKind>> all = mask_combinations();
  for (const std::vector<MaskKind>& kinds : position_combinations()) all.push_back(kinds);
  return all;
}

inline std::vector<std::int32_t> random_lengths(Random& random, std::int64_t batch,
                                                std::int64_t length) {
  std::vector<std::int32_t> lengths;
  for (std::int64_t b = 0; b < batch; ++b) {
    lengths.push_back(static_cast<std::int32_t>(draw(random, 0, length)));
  }
  return lengths;
}

/// Ids of every position: runs of random length, ids from −1 to 3 in any order.
inline std::vector<std::int32_t> random_segments(Random& random, std::int64_t batch,
                                                 std::int64_t length) {
  std::vector<std::int32_t> ids;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t end = (b + 1) * length;
    while (static_cast<std::int64_t>(ids.size()) < end) {
      const auto left = end - static_cast<std::int64_t>(ids.size());
      const std::int64_t run =
          std::min(left, draw(random, 1, std::max<std::int64_t>(1, length / 3)));
      ids.insert(ids.end(), static_cast<std::size_t>(run),
                 static_cast<std::int32_t>(draw(random, -1, 3)));
    }
  }
  return ids;
}

/// Five documents, some of them often empty.
inline std::vector<std::int32_t> random_documents(Random& random, std::int64_t batch,
                                                  std::int64_t length) {
  std::vector<std::int32_t> ids;
  for (std::int64_t b = 0; b < batch; ++b) {
    std::vector<std::int32_t> sums{0, static_cast<std::int32_t>(length)};
    for (int i = 0; i < 4; ++i) sums.push_back(static_cast<std::int32_t>(draw(random, 0, length)));
    sums.push_back(sums.back());
    std::sort(sums.begin(), sums.end());
    const std::vector<std::int32_t> one = segments_from_cu_seqlens(sums, length);
    ids.insert(ids.end(), one.begin(), one.end());
  }
  return ids;
}

/// Prefix sums of so many documents, some of them often empty.
inline std::vector<std::int32_t> random_cu_seqlens(Random& random, std::int64_t documents,
                                                   std::int64_t length) {
  std::vector<std::int32_t> sums{0, static_cast<std::int32_t>(length)};
  for (std::int64_t d = 1; d < documents; ++d) {
    sums.push_back(static_cast<std::int32_t>(draw(random, 0, length)));
  }
  std::sort(sums.begin(), sums.end());
  return sums;
}

inline Mask random_mask(Random& random, const std::vector<MaskKind>& kinds, std::int64_t batch,
                        std::int64_t query_length, std::int64_t kv_length) {
  Mask mask;
  std::int64_t left = -1;
  std::int64_t right = -1;
  bool packed = false;
  const auto reach = [&] { return draw(random, 0, std::max<std::int64_t>(1, kv_length / 2)); };
  for (const MaskKind kind : kinds) {
    switch (kind) {
      case MaskKind::causal:
        mask.set_causal(true);
        break;
      case MaskKind::offset:
        mask.set_causal(true);
        mask.set_offset(draw(random, -query_length, kv_length));
        break;
      case MaskKind::window:
        left = reach();
        right = reach();
        break;
      case MaskKind::left_window:
        left = reach();
        break;
      case MaskKind::right_window:
        right = reach();
        break;
      case MaskKind::segments:
        mask.set_segments(batch, random_segments(random, batch, query_length),
                          random_segments(random, batch, kv_length));
        break;
      case MaskKind::documents:
        mask.set_segments(batch, random_documents(random, batch, query_length),
                          random_documents(random, batch, kv_length));
        break;
      case MaskKind::query_lengths:
        mask.set_query_lengths(random_lengths(random, batch, query_length));
        break;
      case MaskKind::kv_lengths:
        mask.set_kv_lengths(random_lengths(random, batch, kv_length));
        break;
      case MaskKind::offsets: {
        std::vector<std::int32_t> offsets;
        for (std::int64_t b = 0; b < batch; ++b) {
          offsets.push_back(static_cast<std::int32_t>(draw(random, -query_length, kv_length)));
        }
        mask.set_causal(true);
        mask.set_offsets(offsets);
        break;
      }
      case MaskKind::prefix:
        mask.set_prefix(draw(random, 1, kv_length));
        break;
      case MaskKind::prefixes:
        mask.set_prefixes(random_lengths(random, batch, kv_length));
        break;
      case MaskKind::sink_tokens:
        mask.set_sink_tokens(draw(random, 1, std::max<std::int64_t>(1, kv_length / 4)));
        break;
      case MaskKind::chunk:
        mask.set_chunk(draw(random, 1, std::max<std::int64_t>(1, kv_length / 2)));
        break;
      case MaskKind::packings:
        packed = true;
        break;
    }
  }
  mask.set_window(left, right);
  if (packed) {  // replaces segments and offsets
    mask.set_offset(0);
    const std::int64_t documents = draw(random, 1, 5);
    std::vector<std::int32_t> query = random_cu_seqlens(random, documents, query_length);
    std::vector<std::int32_t> kv = random_cu_seqlens(random, documents, kv_length);
    mask.set_packings(
        batch, std::move(query), std::move(kv),
        draw(random, 0, 1) == 0 ? DocumentAlignment::top_left : DocumentAlignment::bottom_right);
  }
  return mask;
}

/// Blocks of `smallest` to `largest` positions; each dimension of the entries may be broadcast.
inline BlockMask random_block_mask(Random& random, std::int64_t batch, std::int64_t heads,
                                   std::int64_t query_length, std::int64_t kv_length,
                                   std::int64_t largest, std::int64_t smallest = 1) {
  const BlockSize size{draw(random, smallest, largest), draw(random, smallest, largest)};
  const std::int64_t query_blocks = (query_length + size.query - 1) / size.query;
  const std::int64_t kv_blocks = (kv_length + size.kv - 1) / size.kv;
  Extents shape{batch, heads, query_blocks, kv_blocks};
  for (int dim = 0; dim < 4; ++dim) {
    if (draw(random, 0, dim < 2 ? 1 : 7) == 0) shape[dim] = 1;
  }
  const std::int64_t percent = draw(random, 5, 95);
  std::vector<std::uint8_t> entries(static_cast<std::size_t>(shape.product()));
  for (std::uint8_t& entry : entries) entry = draw(random, 1, 100) <= percent ? 1 : 0;
  return BlockMask(shape, size, entries);
}

/// No other part, each kind alone, and every pair of kinds: to be combined with blocks.
inline std::vector<std::vector<MaskKind>> kinds_beside_blocks() {
  std::vector<std::vector<MaskKind>> all = mask_combinations();
  all.emplace_back();
  return all;
}

}  // namespace annulus::test
