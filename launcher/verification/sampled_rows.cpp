#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <annulus/attention/oracle.hpp>
#include <annulus/core/parallel.hpp>
#include <annulus/verification/sampled_rows.hpp>

namespace annulus::verification {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// One row of a rank: its indices in the shards and in the whole problem.
struct Sample {
  std::int64_t batch = 0;
  std::int64_t row = 0;
  std::int64_t kv_head = 0;
  std::int64_t first_head = 0;  // of the query heads that read the key/value head
  std::int64_t heads = 0;

  [[nodiscard]] ConstTensorView of(const Tensor& tensor) const {
    return tensor.view().slice(0, batch, 1).slice(1, row, 1).slice(2, first_head, heads);
  }
  // The row's scores, LSE, maximum or sum.
  [[nodiscard]] auto by_head(const auto& tensor) const {
    return tensor.slice(0, batch, 1).slice(1, first_head, heads).slice(2, row, 1);
  }
};

std::vector<Sample> samples_of(const Extents& output, std::int64_t kv_heads) {
  if (output.product() == 0 || kv_heads == 0) return {};
  const std::int64_t heads = output[2] / kv_heads;
  const std::int64_t count = std::min(kSampledRows, output[1]);
  std::vector<Sample> samples;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t row = count == 1 ? 0 : i * (output[1] - 1) / (count - 1);
    const std::int64_t kv_head = i % kv_heads;
    samples.push_back({i % output[0], row, kv_head, kv_head * heads, heads});
  }
  return samples;
}

// Merges one row's attention over some columns with that over the columns of `part`
// (docs/semantics.md §1).
void merge(OracleOutput& row, const OracleOutput& part) {
  const std::size_t dim = row.output.size() / row.lse.size();
  for (std::size_t head = 0; head < part.lse.size(); ++head) {
    if (part.lse[head] == kMinusInfinity) continue;  // sees nothing there
    const double ahead = row.lse[head] - part.lse[head];
    const double lse =
        std::max(row.lse[head], part.lse[head]) + std::log1p(std::exp(-std::abs(ahead)));
    const double weight = std::exp(row.lse[head] - lse);
    const double part_weight = std::exp(part.lse[head] - lse);
    for (std::size_t i = head * dim; i < (head + 1) * dim; ++i) {
      row.output[i] = weight * row.output[i] + part_weight * part.output[i];
    }
    row.lse[head] = lse;
    row.maximum[head] = std::max(row.maximum[head], part.maximum[head]);
    RowTerms& terms = row.terms[head];
    const RowTerms& added = part.terms[head];
    terms.root_square = std::hypot(weight * terms.root_square, part_weight * added.root_square);
    terms.sum = weight * terms.sum + part_weight * added.sum;
    terms.largest_dot = std::max(terms.largest_dot, added.largest_dot);
    terms.largest_capped = std::max(terms.largest_capped, added.largest_capped);
    terms.largest_bias = std::max(terms.largest_bias, added.largest_bias);
  }
}

}  // namespace

Deviation sampled_deviation(const AttentionProblem& problem, const ring::ShardedOperands& operands,
                            const CaseShards& shards, std::uint64_t seed, int rank, int threads) {
  const std::vector<PositionRanges> held = operands.key.index(rank);
  const std::vector<Sample> samples = samples_of(shards.output.shape(), held[2].size());
  if (samples.empty()) return {};
  const PositionRanges rows = operands.query.positions(rank, 1);
  const std::int64_t first_head =
      operands.query.positions(rank, 2).global(LocalPosition(0)).value();

  // A key/value head of a long sequence is large, so its columns are made piece by piece, on all
  // threads.
  const std::int64_t length = problem.shape.kv_length;
  const std::int64_t pieces = (length + kSampledColumns - 1) / kSampledColumns;
  const auto tasks = static_cast<std::int64_t>(samples.size()) * pieces;
  std::vector<OracleOutput> parts(static_cast<std::size_t>(tasks));
  HostMemoryPool memory;
  const ScoreTensors scores = shards.scores(length);
  AttentionProblem keys_alone = problem;  // a row's sinks count once, not once per piece
  keys_alone.sinks.reset();
  keys_alone.normalize_output = true;
  const auto compute = [&](std::int64_t task, int /*worker*/) {
    const Sample& sample = samples[static_cast<std::size_t>(task / pieces)];
    const std::int64_t first_column = task % pieces * kSampledColumns;
    const PositionRange columns{GlobalPosition(first_column),
                                std::min(kSampledColumns, length - first_column), 1};
    const PositionRanges row = rows.slice({LocalPosition(sample.row), 1});
    const std::int64_t batch = held[0].global(LocalPosition(sample.batch)).value();
    if (problem.mask.examine(batch, 1, row.ranges()[0], columns).empty()) return;
    const auto part = [&](const NamedSharding& sharding, Operand operand) {
      return random_part(
          {PositionRanges::all(problem.shape.batch).slice({LocalPosition(batch), 1}),
           PositionRanges({columns}), held[2].slice({LocalPosition(sample.kv_head), 1}),
           PositionRanges::all(sharding.global_shape()[3])},
          sharding.global_shape(), problem.dtype, seed, operand, memory);
    };
    const Tensor key = part(operands.key, Operand::key);
    const Tensor value = part(operands.value, Operand::value);
    parts[static_cast<std::size_t>(task)] =
        oracle_attention(keys_alone, sample.of(shards.query), key.view(), value.view(), row, batch,
                         first_head + sample.first_head, first_column, sample.by_head(scores));
  };
  parallel_for(tasks, static_cast<int>(std::clamp<std::int64_t>(threads, 1, tasks)), compute);

  Deviation total;
  auto part = parts.begin();
  for (const Sample& sample : samples) {
    const ConstTensorView output = sample.of(shards.output);
    OracleOutput truth{std::vector<double>(static_cast<std::size_t>(output.elements())),
                       std::vector<double>(static_cast<std::size_t>(sample.heads), kMinusInfinity)};
    truth.maximum = truth.lse;
    truth.terms.resize(truth.lse.size());
    for (std::int64_t head = 0; problem.sinks && head < sample.heads; ++head) {
      const std::int64_t global = first_head + sample.first_head + head;
      truth.lse[static_cast<std::size_t>(head)] = problem.sinks->lse(global);
      truth.maximum[static_cast<std::size_t>(head)] =
          std::ranges::max(problem.sinks->of_head(global));
    }
    for (std::int64_t i = 0; i < pieces; ++i) merge(truth, *part++);
    total.add(problem.normalize_output
                  ? compare(problem, truth, output, sample.by_head(shards.lse.view()))
                  : compare(problem, truth, output, sample.by_head(shards.maximum.view()),
                            sample.by_head(shards.sum.view())));
  }
  return total;
}

}  // namespace annulus::verification
