#include <algorithm>
#include <cstddef>
#include <functional>
#include <future>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/attention/score_tensors.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/verification/non_finite_entries.hpp>
#include <annulus/verification/random_tensor.hpp>

#include "entries.hpp"

namespace annulus::verification {
namespace {

constexpr float kNan = kNonFinite[0];

// The value that replaces entries of a vector.
struct Spoilt {
  float value = 0;
  std::int64_t dim = -1;  // of the one entry; −1: all entries
};
// By batch, position and head.
using SpoiltVectors = std::map<Entry, Spoilt>;

struct SpoiltColumns {
  SpoiltVectors keys, values;
};

// The number of pairs of a query head and a row that see each key, by batch, position and
// key/value head.
struct Viewers {
  explicit Viewers(const AttentionShape& shape)
      : length(shape.kv_length),
        heads(shape.kv_heads),
        counts(static_cast<std::size_t>(shape.batch * length * heads)) {}
  std::int64_t& at(std::int64_t batch, std::int64_t position, std::int64_t head) {
    return counts[static_cast<std::size_t>((batch * length + position) * heads + head)];
  }

  std::int64_t length, heads;
  std::vector<std::int64_t> counts;
};

// Some rows of a bias or a dense mask, in all batches and heads; empty if there is none.
Tensor rows_of(const std::optional<Extents>& scores, const FillPart& fill, DType dtype,
               LocalRange rows, MemoryPool& memory) {
  if (!scores || !fill) return {};
  std::vector<PositionRanges> index;
  for (const std::int64_t size : *scores) index.push_back(PositionRanges::all(size));
  if ((*scores)[2] != 1) index[2] = index[2].slice(rows);
  Extents shape = *scores;
  shape[2] = index[2].size();
  Tensor part(dtype, shape, memory);
  fill(part.view(), index);
  return part;
}

Viewers viewers_of(const AttentionProblem& problem, const OperandFills& fills) {
  constexpr std::int64_t kRows = 64;
  const AttentionShape& shape = problem.shape;
  Viewers viewers(shape);
  HostMemoryPool memory;
  for (std::int64_t begin = 0; begin < shape.query_length; begin += kRows) {
    const std::int64_t count = std::min(kRows, shape.query_length - begin);
    const LocalRange rows{LocalPosition(begin), count};
    const Tensor bias = rows_of(problem.bias, fills.bias, DType::float32, rows, memory);
    const Tensor mask = rows_of(problem.dense_mask, fills.mask, DType::boolean, rows, memory);
    const ScoreTensors scores = broadcast_scores(
        bias.view(), mask.view(), {shape.batch, shape.heads, count, shape.kv_length});
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      for (std::int64_t n = 0; n < shape.heads; ++n) {
        for (std::int64_t t = 0; t < count; ++t) {
          for (std::int64_t s = 0; s < shape.kv_length; ++s) {
            const GlobalPosition key(s);
            if (problem.mask.visible(b, n, GlobalPosition(begin + t), key) &&
                scores.shows(b, n, t, s)) {
              ++viewers.at(b, s, n / shape.heads_per_kv_head());
            }
          }
        }
      }
    }
  }
  return viewers;
}

// The position of a key that some rows see, and at least as many do not; −1 if there is none.
std::int64_t half_seen(const AttentionShape& shape, Viewers& viewers, std::int64_t batch,
                       std::int64_t kv_head, std::uint64_t draw) {
  const std::int64_t all = shape.heads_per_kv_head() * shape.query_length;
  std::vector<std::int64_t> candidates;
  for (std::int64_t s = 0; s < shape.kv_length; ++s) {
    const std::int64_t count = viewers.at(batch, s, kv_head);
    if (count > 0 && 2 * count <= all) candidates.push_back(s);
  }
  return candidates.empty() ? -1 : candidates[draw % candidates.size()];
}

// True if cuDNN may compute, which multiplies hidden values by 0.
bool may_multiply_hidden(const AttentionProblem& problem, Place::Kind device) {
  static const Registry registry = Registry::standard();
  return device == Place::Kind::cuda && registry.get("sdpa").accepts(problem, Place::cuda(0));
}

SpoiltColumns spoilt_columns(const AttentionProblem& problem, const OperandFills& fills,
                             std::uint64_t seed, Place::Kind device) {
  const AttentionShape& shape = problem.shape;
  Viewers viewers = viewers_of(problem, fills);
  SpoiltColumns spoilt;
  const bool multiplied = may_multiply_hidden(problem, device);
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t s = 0; s < shape.kv_length; ++s) {
      for (std::int64_t k = 0; k < shape.kv_heads; ++k) {
        if (viewers.at(b, s, k) > 0) continue;
        const auto which = static_cast<std::size_t>(s + k);
        spoilt.keys[{b, s, k}].value = kNonFinite[which % 3];
        if (!multiplied) spoilt.values[{b, s, k}].value = kNonFinite[which / 3 % 3];
      }
    }
  }
  if (shape.batch == 0) return spoilt;
  const auto drawn = [&](std::int64_t below) {
    return static_cast<std::int64_t>(seed % static_cast<std::uint64_t>(below));
  };
  const std::int64_t batch = drawn(shape.batch);
  for (std::int64_t k = 0; k < shape.kv_heads; ++k) {
    const auto which = static_cast<std::size_t>(seed / 7 % 9) + static_cast<std::size_t>(k);
    const std::int64_t key = half_seen(shape, viewers, batch, k, seed / 3);
    const std::int64_t value = half_seen(shape, viewers, batch, k, seed / 5);
    if (key >= 0) {
      const bool nan = key == value || device == Place::Kind::cuda;
      spoilt.keys[{batch, key, k}] = {nan ? kNan : kNonFinite[which % 3], drawn(shape.head_dim)};
    }
    if (value >= 0 && !multiplied) {
      spoilt.values[{batch, value, k}] = {kNonFinite[which / 3 % 3], drawn(shape.value_dim)};
    }
  }
  return spoilt;
}

// One entry of one query, or none.
SpoiltVectors spoilt_queries(const AttentionProblem& problem, std::uint64_t seed,
                             Place::Kind device) {
  const AttentionShape& shape = problem.shape;
  if (seed / 11 % 2 == 0 || shape.batch == 0 || shape.query_length == 0 ||
      may_multiply_hidden(problem, device)) {
    return {};
  }
  const auto drawn = [&](std::uint64_t divisor, std::int64_t below) {
    return static_cast<std::int64_t>(seed / divisor % static_cast<std::uint64_t>(below));
  };
  const bool nan = problem.sinks || device == Place::Kind::cuda;
  return {{{drawn(1, shape.batch), drawn(17, shape.query_length), drawn(19, shape.heads)},
           {nan ? kNan : kNonFinite[seed / 13 % 3], drawn(23, shape.head_dim)}}};
}

void write(float value, void* entry, DType dtype) {
  if (dtype == DType::float64) {
    *static_cast<double*>(entry) = value;
  } else {
    from_float32(&value, dtype, entry, 1);
  }
}

// Calls `fill`, then replaces the spoilt entries of queries, keys or values.
FillPart spoiling(FillPart fill, std::function<const SpoiltVectors&()> spoilt) {
  return [fill = std::move(fill), spoilt = std::move(spoilt)](
             const TensorView& part, std::span<const PositionRanges> index) {
    fill(part, index);
    const SpoiltVectors& vectors = spoilt();
    auto* const first = static_cast<std::byte*>(part.data());
    const auto bytes = static_cast<std::int64_t>(size_of(part.dtype()));
    for_each_entry(index.first(3), [&](const Entry& entry, std::int64_t number) {
      const auto found = vectors.find(entry);
      if (found == vectors.end()) return;
      const auto& [value, dim] = found->second;
      for (std::int64_t d = 0; d < part.size(3); ++d) {
        if (dim >= 0 && d != dim) continue;
        write(value, first + (number * part.size(3) + d) * bytes, part.dtype());
      }
    });
  };
}

}  // namespace

OperandFills with_non_finite_entries(const AttentionProblem& problem, OperandFills fills,
                                     std::uint64_t seed, Place::Kind device) {
  const AttentionShape& shape = problem.shape;
  // Found only when a part is first filled, since many problems are drawn and never run.
  const std::shared_future<SpoiltColumns> columns =
      std::async(std::launch::deferred, [=] {
        return spoilt_columns(problem, fills, seed, device);
      }).share();
  const auto spoil = [&](Operand operand, const Extents& whole, auto spoilt) {
    return spoiling(random_operand(whole, seed, operand), std::move(spoilt));
  };
  const SpoiltVectors queries = spoilt_queries(problem, seed, device);
  if (!queries.empty()) {
    fills.query =
        spoil(Operand::query, {shape.batch, shape.query_length, shape.heads, shape.head_dim},
              [queries]() -> const SpoiltVectors& { return queries; });
  }
  fills.key = spoil(Operand::key, {shape.batch, shape.kv_length, shape.kv_heads, shape.head_dim},
                    [columns]() -> const SpoiltVectors& { return columns.get().keys; });
  fills.value =
      spoil(Operand::value, {shape.batch, shape.kv_length, shape.kv_heads, shape.value_dim},
            [columns]() -> const SpoiltVectors& { return columns.get().values; });
  return fills;
}

}  // namespace annulus::verification
