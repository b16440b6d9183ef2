#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <annulus/attention/mask.hpp>
#include <annulus/core/division.hpp>
#include <annulus/core/error.hpp>

#include "mask/visible_part.hpp"

namespace annulus {
namespace {

// Beyond this many pairs of runs, a tile's visibility is bounded instead of counted.
constexpr std::int64_t kMaxRunPairs = 1 << 16;

// Bounds what users may ask for, so that sums of positions and distances cannot overflow.
constexpr std::int64_t kMaxDistance = std::int64_t{1} << 48;

// A length beyond every position, with room for sums too.
constexpr std::int64_t kNoLimit = std::int64_t{1} << 60;

std::int64_t length_limit(const std::vector<std::int32_t>& lengths, std::int64_t batch) {
  return lengths.empty() ? kNoLimit : lengths[static_cast<std::size_t>(batch)];
}

// The runs that overlap [begin, end), from a list in order of position.
std::span<const SegmentRun> overlapping(std::span<const SegmentRun> runs, GlobalPosition begin,
                                        GlobalPosition end) {
  const auto first = std::partition_point(runs.begin(), runs.end(),
                                          [&](const SegmentRun& run) { return run.end <= begin; });
  return {first, std::partition_point(first, runs.end(),
                                      [&](const SegmentRun& run) { return run.begin < end; })};
}

std::int64_t value_of(std::int64_t one, const std::vector<std::int32_t>& each, std::int64_t batch) {
  return each.empty() ? one : each[static_cast<std::size_t>(batch)];
}

void check_count(const char* name, std::int64_t count) {
  if (count < 0 || count > kMaxDistance) {
    throw ArgumentError(name, std::to_string(count), fmt::format("0 to {}", kMaxDistance));
  }
}

void check_lengths(const char* name, const std::vector<std::int32_t>& lengths) {
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0) {
      throw ArgumentError(fmt::format("{}[{}]", name, i), std::to_string(lengths[i]),
                          "a length of at least 0");
    }
  }
}

void check_batch(const char* name, std::size_t got, std::int64_t batch) {
  if (got != 0 && static_cast<std::int64_t>(got) != batch) {
    throw ArgumentError(name, fmt::format("{} entries", got),
                        fmt::format("one entry per batch: {}", batch));
  }
}

void check_bound(const char* name, const std::vector<std::int32_t>& lengths, std::int64_t size) {
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] > size) {
      throw ArgumentError(fmt::format("{}[{}]", name, i), std::to_string(lengths[i]),
                          fmt::format("at most the sequence length {}", size));
    }
  }
}

}  // namespace

Mask::Segments::Segments(std::int64_t batch, std::vector<std::int32_t> ids, bool by_id)
    : length_(batch > 0 ? static_cast<std::int64_t>(ids.size()) / batch : 0),
      ids_(std::move(ids)),
      runs_(static_cast<std::size_t>(batch)),
      ascending_(static_cast<std::size_t>(batch)) {
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::span<const std::int32_t> row = this->ids(b);
    std::vector<SegmentRun>& runs = runs_[static_cast<std::size_t>(b)];
    for (std::int64_t i = 0; i < length_; ++i) {
      const std::int32_t id = row[static_cast<std::size_t>(i)];
      if (id < 0) continue;
      if (!runs.empty() && runs.back().id == id && runs.back().end == GlobalPosition(i)) {
        runs.back().end = GlobalPosition(i + 1);
      } else {
        runs.push_back({id, GlobalPosition(i), GlobalPosition(i + 1)});
      }
    }
    ascending_[static_cast<std::size_t>(b)] =
        std::adjacent_find(runs.begin(), runs.end(), [](const SegmentRun& x, const SegmentRun& y) {
          return x.id >= y.id;
        }) == runs.end();
    if (by_id) {
      std::stable_sort(runs.begin(), runs.end(),
                       [](const SegmentRun& x, const SegmentRun& y) { return x.id < y.id; });
    }
  }
}

std::span<const std::int32_t> Mask::Segments::ids(std::int64_t batch) const {
  return std::span(ids_).subspan(static_cast<std::size_t>(batch * length_),
                                 static_cast<std::size_t>(length_));
}

void Mask::set_window(std::int64_t left, std::int64_t right) {
  for (const std::int64_t side : {left, right}) {
    if (side < -1 || side > kMaxDistance) {
      throw ArgumentError("window", std::to_string(side),
                          fmt::format("0 to {}, or -1 for unlimited", kMaxDistance));
    }
  }
  parts_.window_left = left;
  parts_.window_right = right;
}

void Mask::set_offset(std::int64_t offset) {
  if (offset < -kMaxDistance || offset > kMaxDistance) {
    throw ArgumentError("causal offset", std::to_string(offset),
                        fmt::format("a distance of at most {}", kMaxDistance));
  }
  offset_ = offset;
  offsets_.clear();
}

void Mask::set_offsets(std::vector<std::int32_t> offsets) {
  offset_ = 0;
  offsets_ = std::move(offsets);
}

void Mask::set_prefix(std::int64_t prefix) {
  check_count("prefix", prefix);
  prefix_ = prefix;
  prefixes_.clear();
}

void Mask::set_prefixes(std::vector<std::int32_t> prefixes) {
  check_lengths("prefix", prefixes);
  prefix_ = 0;
  prefixes_ = std::move(prefixes);
}

void Mask::set_sink_tokens(std::int64_t tokens) {
  check_count("sink tokens", tokens);
  parts_.sink_tokens = tokens;
}

void Mask::set_chunk(std::int64_t chunk) {
  check_count("chunk", chunk);
  parts_.chunk = chunk;
}

void Mask::set_segments(std::int64_t batch, std::vector<std::int32_t> query_ids,
                        std::vector<std::int32_t> kv_ids) {
  for (const std::vector<std::int32_t>* ids : {&query_ids, &kv_ids}) {
    const auto count = static_cast<std::int64_t>(ids->size());
    if (batch < 0 || (batch == 0 ? count != 0 : count % batch != 0)) {
      throw ArgumentError("segment ids", fmt::format("{} ids", count),
                          fmt::format("the same number for each of {} batches", batch));
    }
  }
  query_segments_ = Segments(batch, std::move(query_ids), false);
  kv_segments_ = Segments(batch, std::move(kv_ids), true);
  query_cu_seqlens_.clear();
  kv_cu_seqlens_.clear();
  alignment_.reset();
}

void Mask::set_packings(std::int64_t batch, std::vector<std::int32_t> query_cu_seqlens,
                        std::vector<std::int32_t> kv_cu_seqlens,
                        std::optional<DocumentAlignment> alignment) {
  const auto ids = [&](const char* name, const std::vector<std::int32_t>& cu_seqlens) {
    const std::int64_t length = cu_seqlens.empty() ? 0 : cu_seqlens.back();
    const std::vector<std::int32_t> row = segments_from_cu_seqlens(cu_seqlens, length, name);
    std::vector<std::int32_t> all;
    all.reserve(row.size() * static_cast<std::size_t>(batch));
    for (std::int64_t b = 0; b < batch; ++b) all.insert(all.end(), row.begin(), row.end());
    return all;
  };
  std::vector<std::int32_t> query_ids = ids("cu_seqlens_q", query_cu_seqlens);
  std::vector<std::int32_t> kv_ids = ids("cu_seqlens_kv", kv_cu_seqlens);
  if (query_cu_seqlens.size() != kv_cu_seqlens.size()) {
    throw ArgumentError("cu_seqlens_kv", fmt::format("{} documents", kv_cu_seqlens.size() - 1),
                        fmt::format("as many as of queries: {}", query_cu_seqlens.size() - 1));
  }
  set_segments(batch, std::move(query_ids), std::move(kv_ids));
  query_cu_seqlens_ = std::move(query_cu_seqlens);
  kv_cu_seqlens_ = std::move(kv_cu_seqlens);
  alignment_ = alignment;
}

void Mask::set_query_lengths(std::vector<std::int32_t> lengths) {
  check_lengths("q_lengths", lengths);
  query_lengths_ = std::move(lengths);
}

void Mask::set_kv_lengths(std::vector<std::int32_t> lengths) {
  check_lengths("kv_lengths", lengths);
  kv_lengths_ = std::move(lengths);
}

void Mask::validate(std::int64_t batch, std::int64_t heads, std::int64_t query_length,
                    std::int64_t kv_length) const {
  check_batch("causal offset", offsets_.size(), batch);
  check_batch("prefix", prefixes_.size(), batch);
  check_batch("q_lengths", query_lengths_.size(), batch);
  check_batch("kv_lengths", kv_lengths_.size(), batch);
  check_bound("q_lengths", query_lengths_, query_length);
  check_bound("kv_lengths", kv_lengths_, kv_length);
  if (block_mask_) block_mask_->validate(batch, heads, query_length, kv_length);
  if (has_packings() && parts_.limited() && !alignment_) {
    throw ArgumentError("causal offset", "none for two packings",
                        "top-left or bottom-right: causal, window and chunk need an alignment");
  }
  if (has_packings() && (offset_ != 0 || !offsets_.empty())) {
    throw ArgumentError("causal offset",
                        offsets_.empty() ? std::to_string(offset_) : "one per batch",
                        "top-left or bottom-right with two packings");
  }
  if (!has_segments()) return;
  const auto check = [&](const char* name, const Segments& segments, std::int64_t length) {
    if (segments.batches() != batch || segments.length() != length) {
      throw ArgumentError(name, fmt::format("[{}, {}]", segments.batches(), segments.length()),
                          fmt::format("[{}, {}]", batch, length));
    }
  };
  check("query segment ids", query_segments_, query_length);
  check("kv segment ids", kv_segments_, kv_length);
}

bool Mask::one_band() const {
  if (!parts_.limited()) return true;
  const bool sinks = parts_.sink_tokens > 0 && (parts_.window() || parts_.chunk > 0);
  return parts_.chunk == 0 && !sinks && !has_prefix() && offsets_.empty() && !has_packings();
}

Band Mask::band() const {
  return parts_.rule({0, 0, offset_, 0}).band;
}

PositionFrame Mask::frame(std::int64_t batch, std::int32_t document) const {
  const std::int64_t prefix = value_of(prefix_, prefixes_, batch);
  if (!has_packings()) return {0, 0, value_of(offset_, offsets_, batch), prefix};
  return frame_of_document(query_cu_seqlens_.data(), kv_cu_seqlens_.data(), document,
                           alignment_ == DocumentAlignment::bottom_right, prefix);
}

PositionRule Mask::position_rule(std::int64_t batch, GlobalPosition row) const {
  const auto i = static_cast<std::size_t>(row.value());
  return parts_.rule(frame(batch, has_packings() ? query_segments(batch)[i] : 0));
}

std::uint64_t Mask::digest() const {
  std::uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a, a word at a time
  const auto add = [&hash](std::int64_t value) {
    hash = (hash ^ static_cast<std::uint64_t>(value)) * 0x100000001b3U;
  };
  const auto add_all = [&](const auto& values) {
    add(static_cast<std::int64_t>(values.size()));
    for (const std::int32_t value : values) add(value);
  };
  for (const std::int64_t value :
       {static_cast<std::int64_t>(parts_.causal), offset_, parts_.window_left, parts_.window_right,
        prefix_, parts_.sink_tokens, parts_.chunk,
        alignment_ ? static_cast<std::int64_t>(*alignment_) : -1}) {
    add(value);
  }
  for (const auto* values : {&offsets_, &prefixes_, &query_cu_seqlens_, &kv_cu_seqlens_}) {
    add_all(*values);
  }
  for (std::int64_t b = 0; b < query_segments_.batches(); ++b) {
    add_all(query_segments_.ids(b));
    add_all(kv_segments_.ids(b));
  }
  add_all(query_lengths_);
  add_all(kv_lengths_);
  if (block_mask_) add(static_cast<std::int64_t>(block_mask_->digest()));
  return hash;
}

bool Mask::visible(std::int64_t batch, std::int64_t head, GlobalPosition row,
                   GlobalPosition column) const {
  const std::int64_t i = row.value();
  const std::int64_t j = column.value();
  if (i >= length_limit(query_lengths_, batch) || j >= length_limit(kv_lengths_, batch)) {
    return false;
  }
  if (block_mask_ && !block_mask_->visible(batch, head, row, column)) return false;
  std::int32_t document = 0;
  if (has_segments()) {
    document = query_segments(batch)[static_cast<std::size_t>(i)];
    if (document < 0 || document != kv_segments(batch)[static_cast<std::size_t>(j)]) return false;
  }
  const PositionFrame from = frame(batch, document);
  const std::int64_t key = j - from.key_begin;
  const std::int64_t diagonal = i - from.query_begin + from.offset;
  if (key < from.prefix) return true;
  if (parts_.causal && key > diagonal) return false;
  if (key < parts_.sink_tokens) return true;
  if (parts_.window_left >= 0 && key < diagonal - parts_.window_left) return false;
  if (parts_.window_right >= 0 && key > diagonal + parts_.window_right) return false;
  return parts_.chunk == 0 ||
         floor_divide(diagonal, parts_.chunk) == floor_divide(key, parts_.chunk);
}

Visibility Mask::examine(std::int64_t batch, std::int64_t batches, const PositionRange& rows,
                         const PositionRange& columns) const {
  if (rows.length == 0 || columns.length == 0 || batches == 0) return {};
  const auto in_batch = [&](std::int64_t b) {
    const BandAndBlocks seen{{}, blocks(), b};
    Visibility one = examine_one(seen, true, rows, columns);
    const std::int64_t heads = seen.heads();
    one.exact = one.exact && one.pairs % heads == 0;
    one.pairs = ceil_divide(one.pairs, heads);
    return one;
  };
  if (!depends_on_batch()) {
    Visibility result = in_batch(batch);
    result.pairs *= batches;
    return result;
  }
  Visibility total;
  total.full = true;
  for (std::int64_t b = batch; b < batch + batches; ++b) {
    const Visibility one = in_batch(b);
    total.pairs += one.pairs;
    total.full = total.full && one.full;
    total.exact = total.exact && one.exact;
    total.rows = hull(total.rows, one.rows);
    total.columns = hull(total.columns, one.columns);
  }
  return total;
}

Visibility Mask::examine_head(std::int64_t batch, std::int64_t head, const PositionRange& rows,
                              const PositionRange& columns) const {
  if (rows.length == 0 || columns.length == 0) return {};
  return examine_one({{}, blocks(), batch, head}, true, rows, columns);
}

Visibility Mask::examine_without_band(std::int64_t batch, const PositionRange& rows,
                                      const PositionRange& columns) const {
  if (rows.length == 0 || columns.length == 0) return {};
  return examine_one({{}, nullptr, batch}, false, rows, columns);
}

Visibility Mask::examine_one(const BandAndBlocks& seen, bool by_position,
                             const PositionRange& all_rows,
                             const PositionRange& all_columns) const {
  const std::int64_t batch = seen.batch;
  const std::int64_t all_pairs = seen.heads() * all_rows.length * all_columns.length;
  const GlobalPosition row_limit(length_limit(query_lengths_, batch));
  const GlobalPosition column_limit(length_limit(kv_lengths_, batch));
  const PositionRange rows = all_rows.slice(0, all_rows.count_below(row_limit));
  const PositionRange columns = all_columns.slice(0, all_columns.count_below(column_limit));
  Visibility result;
  const auto rule_of = [&](std::int32_t document) {
    return by_position ? parts_.rule(frame(batch, document)) : PositionRule{};
  };
  if (!has_segments()) {
    add_rule(result, rule_of(0), seen, rows, 0, columns, 0);
    result.full = result.exact && result.pairs == all_pairs;
    return result;
  }
  if (rows.length == 0 || columns.length == 0) return result;

  const std::vector<SegmentRun>& kv_runs = kv_segments_.runs(batch);
  std::span<const SegmentRun> query_runs = this->query_runs(batch, rows.start, rows.last() + 1);
  if (kv_segments_.ascending(batch) && query_segments_.ascending(batch)) {
    // Only ids that the columns have: both are in order of ids.
    const std::span<const SegmentRun> reached =
        overlapping(kv_runs, columns.start, columns.last() + 1);
    if (reached.empty()) return result;
    const auto first =
        std::partition_point(query_runs.begin(), query_runs.end(),
                             [&](const SegmentRun& run) { return run.id < reached.front().id; });
    const auto last = std::partition_point(first, query_runs.end(), [&](const SegmentRun& run) {
      return run.id <= reached.back().id;
    });
    query_runs = {first, last};
  }
  std::int64_t budget = kMaxRunPairs;
  for (const SegmentRun& query_run : query_runs) {
    const LocalRange row_part = rows.indices_within(query_run.begin, query_run.end);
    if (row_part.count == 0) continue;
    auto kv_run = std::partition_point(kv_runs.begin(), kv_runs.end(), [&](const SegmentRun& run) {
      return run.id < query_run.id || (run.id == query_run.id && run.end <= columns.start);
    });
    for (; kv_run != kv_runs.end() && kv_run->id == query_run.id && kv_run->begin <= columns.last();
         ++kv_run) {
      if (--budget < 0) {
        Visibility all;
        add_rule(all, has_packings() ? PositionRule{} : rule_of(0), {{}, nullptr, batch}, rows, 0,
                 columns, 0);
        result.exact = false;
        result.pairs = seen.heads() * all.pairs;
        result.rows = {LocalPosition(0), rows.length};
        result.columns = {LocalPosition(0), columns.length};
        return result;
      }
      const LocalRange column_part = columns.indices_within(kv_run->begin, kv_run->end);
      add_rule(result, rule_of(query_run.id), seen,
               rows.slice(row_part.begin.value(), row_part.count), row_part.begin.value(),
               columns.slice(column_part.begin.value(), column_part.count),
               column_part.begin.value());
    }
  }
  result.full = result.exact && result.pairs == all_pairs;
  return result;
}

std::array<Mask::Interval, 2> Mask::row_intervals(std::int64_t batch, GlobalPosition row) const {
  if (row.value() >= length_limit(query_lengths_, batch)) return {};
  if (has_packings() && query_segments(batch)[static_cast<std::size_t>(row.value())] < 0) return {};
  const std::int64_t limit = length_limit(kv_lengths_, batch);
  const KeySpans keys = position_rule(batch, row).keys_of(row.value());
  const auto up_to_limit = [&](std::int64_t begin, std::int64_t end) {
    return Interval{GlobalPosition(std::min(begin, limit)), GlobalPosition(std::min(end, limit))};
  };
  return {up_to_limit(0, keys.opening), up_to_limit(keys.begin, keys.end)};
}

std::span<const std::int32_t> Mask::query_segments(std::int64_t batch) const {
  return has_segments() ? query_segments_.ids(batch) : std::span<const std::int32_t>();
}

std::span<const std::int32_t> Mask::kv_segments(std::int64_t batch) const {
  return has_segments() ? kv_segments_.ids(batch) : std::span<const std::int32_t>();
}

std::span<const SegmentRun> Mask::query_runs(std::int64_t batch, GlobalPosition begin,
                                             GlobalPosition end) const {
  if (!has_segments()) return {};
  return overlapping(query_segments_.runs(batch), begin, end);
}

std::span<const SegmentRun> Mask::kv_runs(std::int64_t batch, std::int32_t id) const {
  if (!has_segments()) return {};
  return std::ranges::equal_range(kv_segments_.runs(batch), id, {}, &SegmentRun::id);
}

std::span<const SegmentRun> Mask::kv_runs(std::int64_t batch) const {
  if (!has_segments()) return {};
  return kv_segments_.runs(batch);
}

std::vector<std::int32_t> segments_from_cu_seqlens(std::span<const std::int32_t> cu_seqlens,
                                                   std::int64_t length, const char* name) {
  const auto fail = [&](std::size_t index, const std::string& expected) {
    throw ArgumentError(fmt::format("{}[{}]", name, index), std::to_string(cu_seqlens[index]),
                        expected);
  };
  if (cu_seqlens.empty()) {
    throw ArgumentError(name, "no entries", "number of documents + 1 entries");
  }
  if (cu_seqlens.front() != 0) fail(0, "0");
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i) {
    if (cu_seqlens[i] < cu_seqlens[i - 1]) {
      fail(i, fmt::format("at least the entry before it, {}", cu_seqlens[i - 1]));
    }
  }
  if (cu_seqlens.back() != length) {
    fail(cu_seqlens.size() - 1, fmt::format("the sequence length {}", length));
  }
  std::vector<std::int32_t> ids(static_cast<std::size_t>(length));
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i) {
    std::fill(ids.begin() + cu_seqlens[i - 1], ids.begin() + cu_seqlens[i],
              static_cast<std::int32_t>(i - 1));
  }
  return ids;
}

std::string to_string(const Mask& mask) {
  std::vector<std::string> parts;
  if (mask.causal()) parts.emplace_back("causal");
  if (mask.offset() != 0) parts.push_back(fmt::format("offset {}", mask.offset()));
  if (!mask.offsets().empty()) parts.emplace_back("offset per batch");
  const PositionParts& positions = mask.position_parts();
  if (positions.window()) {
    parts.push_back(fmt::format("window {},{}", mask.window_left(), mask.window_right()));
  }
  if (mask.prefix() > 0) parts.push_back(fmt::format("prefix {}", mask.prefix()));
  if (!mask.prefixes().empty()) parts.emplace_back("prefix per batch");
  if (positions.sink_tokens > 0) {
    parts.push_back(fmt::format("sink tokens {}", positions.sink_tokens));
  }
  if (positions.chunk > 0) parts.push_back(fmt::format("chunk {}", positions.chunk));
  if (mask.has_packings()) {
    parts.emplace_back(!mask.alignment()                                 ? "packings"
                       : mask.alignment() == DocumentAlignment::top_left ? "packings top-left"
                                                                         : "packings bottom-right");
  } else if (mask.has_segments()) {
    parts.emplace_back("segments");
  }
  if (!mask.query_lengths().empty()) parts.emplace_back("q_lengths");
  if (!mask.kv_lengths().empty()) parts.emplace_back("kv_lengths");
  if (mask.block_mask()) parts.push_back(to_string(*mask.block_mask()));
  return parts.empty() ? "none" : fmt::format("{}", fmt::join(parts, ", "));
}

}  // namespace annulus
