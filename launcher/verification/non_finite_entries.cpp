#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/attention/score_tensors.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/verification/non_finite_entries.hpp>
#include <annulus/verification/random_tensor.hpp>

namespace annulus::verification {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr std::array kNonFinite{kNan, kInfinity, -kInfinity};

// A number for each batch, key position and key/value head.
template <class Number>
class ByColumn {
 public:
  explicit ByColumn(const AttentionShape& shape)
      : length_(shape.kv_length),
        heads_(shape.kv_heads),
        numbers_(static_cast<std::size_t>(shape.batch * shape.kv_length * shape.kv_heads)) {}
  Number& at(std::int64_t batch, std::int64_t position, std::int64_t head) {
    return numbers_[static_cast<std::size_t>((batch * length_ + position) * heads_ + head)];
  }
  const Number& at(std::int64_t batch, std::int64_t position, std::int64_t head) const {
    return const_cast<ByColumn&>(*this).at(batch, position, head);
  }

 private:
  std::int64_t length_;
  std::int64_t heads_;
  std::vector<Number> numbers_;
};

// The values that replace entries of a key or value vector.
struct Spoilt {
  float value = 0;        // 0: nothing is replaced
  std::int64_t dim = -1;  // of the one entry; −1: all entries
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

// The number of pairs of a query head and a row that see each key.
ByColumn<std::int64_t> viewers_of(const AttentionProblem& problem, const OperandFills& fills) {
  constexpr std::int64_t kRows = 64;
  const AttentionShape& shape = problem.shape;
  ByColumn<std::int64_t> viewers(shape);
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
std::int64_t half_seen(const AttentionShape& shape, const ByColumn<std::int64_t>& viewers,
                       std::int64_t batch, std::int64_t kv_head, std::uint64_t draw) {
  const std::int64_t all = shape.heads_per_kv_head() * shape.query_length;
  std::vector<std::int64_t> candidates;
  for (std::int64_t s = 0; s < shape.kv_length; ++s) {
    const std::int64_t count = viewers.at(batch, s, kv_head);
    if (count > 0 && 2 * count <= all) candidates.push_back(s);
  }
  return candidates.empty() ? -1 : candidates[draw % candidates.size()];
}

// A replaced entry of the queries.
struct SpoiltQuery {
  float value = 0;  // 0: none is replaced
  std::int64_t batch = 0, position = 0, head = 0, dim = 0;
};

struct SpoiltColumns {
  ByColumn<Spoilt> keys;
  ByColumn<Spoilt> values;
};

// True if cuDNN may compute, which multiplies hidden values by 0.
bool may_multiply_hidden(const AttentionProblem& problem, Place::Kind device) {
  static const Registry registry = Registry::standard();
  return device == Place::Kind::cuda && registry.get("sdpa").accepts(problem, Place::cuda(0));
}

SpoiltColumns spoilt_columns(const AttentionProblem& problem, const OperandFills& fills,
                             std::uint64_t seed, Place::Kind device) {
  const AttentionShape& shape = problem.shape;
  const ByColumn<std::int64_t> viewers = viewers_of(problem, fills);
  SpoiltColumns spoilt{ByColumn<Spoilt>(shape), ByColumn<Spoilt>(shape)};
  const bool multiplied = may_multiply_hidden(problem, device);
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t s = 0; s < shape.kv_length; ++s) {
      for (std::int64_t k = 0; k < shape.kv_heads; ++k) {
        if (viewers.at(b, s, k) > 0) continue;
        const auto which = static_cast<std::size_t>(s + k);
        spoilt.keys.at(b, s, k).value = kNonFinite[which % 3];
        if (!multiplied) spoilt.values.at(b, s, k).value = kNonFinite[which / 3 % 3];
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
      spoilt.keys.at(batch, key, k) = {nan ? kNan : kNonFinite[which % 3], drawn(shape.head_dim)};
    }
    if (value >= 0 && !multiplied) {
      spoilt.values.at(batch, value, k) = {kNonFinite[which / 3 % 3], drawn(shape.value_dim)};
    }
  }
  return spoilt;
}

SpoiltQuery spoilt_query(const AttentionProblem& problem, std::uint64_t seed, Place::Kind device) {
  const AttentionShape& shape = problem.shape;
  if (seed / 11 % 2 == 0 || shape.batch == 0 || shape.query_length == 0 ||
      may_multiply_hidden(problem, device)) {
    return {};
  }
  const auto drawn = [&](std::uint64_t divisor, std::int64_t below) {
    return static_cast<std::int64_t>(seed / divisor % static_cast<std::uint64_t>(below));
  };
  const bool nan = problem.sinks || device == Place::Kind::cuda;
  return {nan ? kNan : kNonFinite[seed / 13 % 3], drawn(1, shape.batch),
          drawn(17, shape.query_length), drawn(19, shape.heads), drawn(23, shape.head_dim)};
}

// Finds the columns only when a part is first filled, since many problems are drawn and never run.
class Spoiler {
 public:
  explicit Spoiler(std::function<SpoiltColumns()> make) : make_(std::move(make)) {}
  const SpoiltColumns& columns() {
    std::call_once(made_, [this] { columns_ = make_(); });
    return *columns_;
  }

 private:
  std::function<SpoiltColumns()> make_;
  std::once_flag made_;
  std::optional<SpoiltColumns> columns_;
};

void write(float value, void* entry, DType dtype) {
  if (dtype == DType::float64) {
    *static_cast<double*>(entry) = value;
  } else {
    from_float32(&value, dtype, entry, 1);
  }
}

// Calls `fill`, then replaces the spoilt entries of keys or values.
FillPart spoiling(FillPart fill, std::shared_ptr<Spoiler> spoiler,
                  ByColumn<Spoilt> SpoiltColumns::*which) {
  return [fill = std::move(fill), spoiler = std::move(spoiler), which](
             const TensorView& part, std::span<const PositionRanges> index) {
    fill(part, index);
    const ByColumn<Spoilt>& spoilt = spoiler->columns().*which;
    const auto global = [&](std::size_t dim, std::int64_t i) {
      return index[dim].global(LocalPosition(i)).value();
    };
    for (std::int64_t b = 0; b < part.size(0); ++b) {
      for (std::int64_t s = 0; s < part.size(1); ++s) {
        for (std::int64_t k = 0; k < part.size(2); ++k) {
          const Spoilt& one = spoilt.at(global(0, b), global(1, s), global(2, k));
          if (one.value == 0) continue;
          for (std::int64_t d = 0; d < part.size(3); ++d) {
            if (one.dim < 0 || d == one.dim)
              write(one.value, part.address({b, s, k, d}), part.dtype());
          }
        }
      }
    }
  };
}

// Calls `fill`, then replaces the entry of a query if the part has it.
FillPart spoiling(FillPart fill, const SpoiltQuery& query) {
  return [fill = std::move(fill), query](const TensorView& part,
                                         std::span<const PositionRanges> index) {
    fill(part, index);
    const auto is = [&](std::size_t dim, std::int64_t i, std::int64_t position) {
      return index[dim].global(LocalPosition(i)).value() == position;
    };
    for (std::int64_t b = 0; b < part.size(0); ++b) {
      for (std::int64_t t = 0; t < part.size(1); ++t) {
        for (std::int64_t n = 0; n < part.size(2); ++n) {
          if (is(0, b, query.batch) && is(1, t, query.position) && is(2, n, query.head)) {
            write(query.value, part.address({b, t, n, query.dim}), part.dtype());
          }
        }
      }
    }
  };
}

}  // namespace

OperandFills with_non_finite_entries(const AttentionProblem& problem, OperandFills fills,
                                     std::uint64_t seed, Place::Kind device) {
  const AttentionShape& shape = problem.shape;
  const auto spoiler =
      std::make_shared<Spoiler>([=] { return spoilt_columns(problem, fills, seed, device); });
  const auto normal = [&](Operand operand, std::int64_t dims) {
    return random_operand({shape.batch, shape.kv_length, shape.kv_heads, dims}, seed, operand);
  };
  if (const SpoiltQuery query = spoilt_query(problem, seed, device); query.value != 0) {
    fills.query =
        spoiling(random_operand({shape.batch, shape.query_length, shape.heads, shape.head_dim},
                                seed, Operand::query),
                 query);
  }
  fills.key = spoiling(normal(Operand::key, shape.head_dim), spoiler, &SpoiltColumns::keys);
  fills.value = spoiling(normal(Operand::value, shape.value_dim), spoiler, &SpoiltColumns::values);
  return fills;
}

}  // namespace annulus::verification
