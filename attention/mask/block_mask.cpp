#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include <annulus/attention/mask.hpp>
#include <annulus/attention/philox.hpp>
#include <annulus/core/division.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

constexpr std::int64_t kWordBits = 64;

// Behind every position, with room for sums.
constexpr std::int64_t kFar = std::int64_t{1} << 60;

void check_size(const BlockSize& size) {
  if (size.query < 1 || size.kv < 1) {
    throw ArgumentError("block size", fmt::format("{},{}", size.query, size.kv),
                        "at least one query and one key");
  }
}

Extents with_four_dims(const Extents& shape) {
  if (shape.rank() > 4) {
    throw ArgumentError("block mask", to_string(shape), "at most 4 dimensions");
  }
  Extents full{1, 1, 1, 1};
  for (int dim = 0; dim < shape.rank(); ++dim) full[4 - shape.rank() + dim] = shape[dim];
  return full;
}

// An index into a dimension that may stand for any size.
std::int64_t entry_at(std::int64_t index, std::int64_t size) {
  return size == 1 ? 0 : index;
}

// The first bit from `from` on, below `count`, that is `wanted`; else `count`.
std::int64_t find_bit(const std::uint64_t* words, bool wanted, std::int64_t from,
                      std::int64_t count) {
  for (std::int64_t begin = from; begin < count; begin = (begin / kWordBits + 1) * kWordBits) {
    const std::uint64_t word = wanted ? words[begin / kWordBits] : ~words[begin / kWordBits];
    const std::uint64_t left = word >> static_cast<unsigned>(begin % kWordBits);
    if (left != 0) return std::min(count, begin + std::countr_zero(left));
  }
  return count;
}

Extents grid(std::int64_t batch, std::int64_t heads, std::int64_t query_length,
             std::int64_t kv_length, const BlockSize& size) {
  check_size(size);
  return {batch, heads, ceil_divide(query_length, size.query), ceil_divide(kv_length, size.kv)};
}

}  // namespace

template <class IsVisible>
BlockMask BlockMask::make(const Extents& shape, BlockSize size, const IsVisible& is_visible) {
  check_size(size);
  auto entries = std::make_shared<Entries>();
  entries->size = size;
  entries->shape = shape;
  entries->words_per_row = ceil_divide(shape[3], kWordBits);
  entries->words.resize(
      static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * entries->words_per_row));
  entries->shown_before.resize(static_cast<std::size_t>(shape[0] * shape[2] * (shape[3] + 1)));
  std::uint64_t* words = entries->words.data();
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      for (std::int64_t q = 0; q < shape[2]; ++q, words += entries->words_per_row) {
        std::uint32_t* const shown =
            &entries->shown_before[static_cast<std::size_t>((b * shape[2] + q) * (shape[3] + 1))];
        for (std::int64_t k = 0; k < shape[3]; ++k) {
          if (!is_visible(b, h, q, k)) continue;
          words[k / kWordBits] |= std::uint64_t{1} << static_cast<unsigned>(k % kWordBits);
          ++shown[k + 1];
        }
      }
    }
  }
  for (std::size_t row = 0; row < entries->shown_before.size();) {
    const auto first = entries->shown_before.begin() + static_cast<std::ptrdiff_t>(row);
    std::partial_sum(first, first + shape[3] + 1, first);
    row += static_cast<std::size_t>(shape[3] + 1);
  }
  std::uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a, a word at a time
  const auto add = [&hash](std::uint64_t value) { hash = (hash ^ value) * 0x100000001b3U; };
  add(static_cast<std::uint64_t>(size.query));
  add(static_cast<std::uint64_t>(size.kv));
  for (const std::int64_t extent : shape) add(static_cast<std::uint64_t>(extent));
  for (const std::uint64_t word : entries->words) add(word);
  entries->digest = hash;
  return BlockMask(std::move(entries));
}

BlockMask::BlockMask(const Extents& shape, BlockSize size, std::span<const std::uint8_t> entries) {
  const Extents full = with_four_dims(shape);
  if (static_cast<std::int64_t>(entries.size()) != full.product()) {
    throw ArgumentError("block mask", fmt::format("{} entries", entries.size()),
                        fmt::format("{} for shape {}", full.product(), to_string(shape)));
  }
  const auto bad = std::find_if(entries.begin(), entries.end(), [](auto e) { return e > 1; });
  if (bad != entries.end()) {
    throw ArgumentError(fmt::format("block mask[{}]", bad - entries.begin()), std::to_string(*bad),
                        "0 or 1");
  }
  auto next = entries.begin();
  *this = make(full, size, [&](auto...) { return *next++ != 0; });
}

BlockMask BlockMask::covering(const Mask& mask, std::int64_t batch, std::int64_t query_length,
                              std::int64_t kv_length, BlockSize size) {
  const auto block = [](std::int64_t index, std::int64_t block_size, std::int64_t length) {
    const std::int64_t begin = index * block_size;
    return PositionRange{GlobalPosition(begin), std::min(block_size, length - begin)};
  };
  return make(grid(mask.depends_on_batch() ? batch : 1, 1, query_length, kv_length, size), size,
              [&](std::int64_t b, std::int64_t, std::int64_t q, std::int64_t k) {
                return !mask.examine(b, 1, block(q, size.query, query_length),
                                     block(k, size.kv, kv_length))
                            .empty();
              });
}

BlockMask BlockMask::causal(std::int64_t query_length, std::int64_t kv_length, BlockSize size,
                            std::int64_t offset) {
  Mask mask;
  mask.set_causal(true);
  mask.set_offset(offset);
  return covering(mask, 1, query_length, kv_length, size);
}

BlockMask BlockMask::window(std::int64_t query_length, std::int64_t kv_length, std::int64_t left,
                            std::int64_t right, BlockSize size) {
  return sinks_and_window(query_length, kv_length, 0, left, right, size);
}

BlockMask BlockMask::sinks_and_window(std::int64_t query_length, std::int64_t kv_length,
                                      std::int64_t sinks, std::int64_t left, std::int64_t right,
                                      BlockSize size) {
  if (sinks < 0) throw ArgumentError("sinks", std::to_string(sinks), "a number of keys");
  Mask mask;
  mask.set_window(left, right);
  const BlockMask near = covering(mask, 1, query_length, kv_length, size);
  return make(near.shape(), size, [&](std::int64_t, std::int64_t, std::int64_t q, std::int64_t k) {
    return k * size.kv < sinks ||
           near.visible(0, 0, GlobalPosition(q * size.query), GlobalPosition(k * size.kv));
  });
}

BlockMask BlockMask::documents(std::span<const std::int32_t> cu_seqlens, BlockSize size) {
  const std::int64_t length = cu_seqlens.empty() ? 0 : cu_seqlens.back();
  const std::vector<std::int32_t> ids = segments_from_cu_seqlens(cu_seqlens, length);
  Mask mask;
  mask.set_segments(1, ids, ids);
  return covering(mask, 1, length, length, size);
}

BlockMask BlockMask::strided(std::int64_t query_length, std::int64_t kv_length, std::int64_t local,
                             std::int64_t stride, BlockSize size) {
  if (local < 0) throw ArgumentError("local", std::to_string(local), "a number of blocks");
  if (stride < 1) throw ArgumentError("stride", std::to_string(stride), "at least 1 block");
  return make(grid(1, 1, query_length, kv_length, size), size,
              [&](std::int64_t, std::int64_t, std::int64_t q, std::int64_t k) {
                const std::int64_t before = ((q + 1) * size.query - 1) / size.kv - k;
                return before >= 0 && (before < local || before % stride == 0);
              });
}

BlockMask BlockMask::random(std::int64_t query_length, std::int64_t kv_length, std::int64_t heads,
                            double density, std::uint64_t seed, BlockSize size) {
  if (!(density >= 0 && density <= 1)) {
    throw ArgumentError("density", fmt::format("{}", density), "0 to 1");
  }
  constexpr std::uint32_t kBlockStream = 0x626c6f63;  // apart from other uses of the same seed
  const PhiloxKey key = philox_key(seed);
  const auto bound = static_cast<std::uint64_t>(std::ldexp(density, 32));
  return make(grid(1, heads, query_length, kv_length, size), size,
              [&](std::int64_t, std::int64_t h, std::int64_t q, std::int64_t k) {
                const PhiloxCounter words =
                    philox({static_cast<std::uint32_t>(k), static_cast<std::uint32_t>(q),
                            static_cast<std::uint32_t>(h), kBlockStream},
                           key);
                return words[0] < bound;
              });
}

std::vector<std::int32_t> BlockMask::entries() const {
  std::vector<std::int32_t> all;
  all.reserve(static_cast<std::size_t>(shape().product()));
  const std::uint64_t* row = entries_->words.data();
  const std::uint64_t* const end = row + entries_->words.size();
  for (; row != end; row += entries_->words_per_row) {
    for (std::int64_t k = 0; k < shape()[3]; ++k) {
      all.push_back(static_cast<std::int32_t>(
          row[k / kWordBits] >> static_cast<unsigned>(k % kWordBits) & 1U));
    }
  }
  return all;
}

double BlockMask::density() const {
  std::int64_t set = 0;
  for (const std::uint64_t word : entries_->words) set += std::popcount(word);
  const std::int64_t all = shape().product();
  return all == 0 ? 0 : static_cast<double>(set) / static_cast<double>(all);
}

bool BlockMask::operator==(const BlockMask& other) const {
  return entries_ == other.entries_ || (size() == other.size() && shape() == other.shape() &&
                                        entries_->words == other.entries_->words);
}

void BlockMask::validate(std::int64_t batch, std::int64_t heads, std::int64_t query_length,
                         std::int64_t kv_length) const {
  const Extents expected = grid(batch, heads, query_length, kv_length, size());
  for (int dim = 0; dim < expected.rank(); ++dim) {
    if (shape()[dim] == 1 || shape()[dim] == expected[dim]) continue;
    throw ArgumentError("block mask", to_string(shape()),
                        fmt::format("a shape that broadcasts to [B, N, ⌈T/{}⌉, ⌈S/{}⌉] = {}",
                                    size().query, size().kv, to_string(expected)));
  }
}

const std::uint64_t* BlockMask::row_of(std::int64_t batch, std::int64_t head,
                                       GlobalPosition row) const {
  const std::int64_t index =
      (entry_at(batch, shape()[0]) * shape()[1] + entry_at(head, shape()[1])) * shape()[2] +
      entry_at(row.value() / size().query, shape()[2]);
  return entries_->words.data() + index * entries_->words_per_row;
}

std::int64_t BlockMask::keys_per_entry() const {
  return shape()[3] == 1 ? kFar : size().kv;
}

std::span<const std::uint32_t> BlockMask::shown_before(std::int64_t batch,
                                                       GlobalPosition row) const {
  const std::int64_t index =
      entry_at(batch, shape()[0]) * shape()[2] + entry_at(row.value() / size().query, shape()[2]);
  const auto length = static_cast<std::size_t>(shape()[3] + 1);
  return std::span(entries_->shown_before)
      .subspan(static_cast<std::size_t>(index) * length, length);
}

bool BlockMask::visible(std::int64_t batch, std::int64_t head, GlobalPosition row,
                        GlobalPosition column) const {
  const std::int64_t k = entry_at(column.value() / size().kv, shape()[3]);
  const std::uint64_t word = row_of(batch, head, row)[k / kWordBits];
  return (word >> static_cast<unsigned>(k % kWordBits) & 1U) != 0;
}

GlobalPosition BlockMask::end_of_rows(GlobalPosition row) const {
  if (shape()[2] == 1) return GlobalPosition(kFar);
  return GlobalPosition((row.value() / size().query + 1) * size().query);
}

BlockMask::Run BlockMask::next_run(std::int64_t batch, std::int64_t head, GlobalPosition row,
                                   GlobalPosition from) const {
  const std::int64_t count = shape()[3];
  const std::uint64_t* const words = row_of(batch, head, row);
  const std::int64_t first =
      find_bit(words, true, entry_at(from.value() / size().kv, count), count);
  if (first == count) return {from, from};
  if (count == 1) return {from, GlobalPosition(kFar)};
  return {std::max(from, GlobalPosition(first * size().kv)),
          GlobalPosition(find_bit(words, false, first, count) * size().kv)};
}

std::string to_string(const BlockMask& mask) {
  return fmt::format("blocks {},{}", mask.size().query, mask.size().kv);
}

}  // namespace annulus
