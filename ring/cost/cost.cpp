#include "cost/cost.hpp"

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>
#include <annulus/ring/used_share.hpp>

namespace annulus::ring {
namespace {

// Kernels that await columns run on Hopper GPUs.
constexpr double kRowsAtOnce = kMultiprocessors * kTileRows;

BlockExtent extent_of(const Tile& block) {
  return {block.rows.count, block.columns.count, block.heads.count, block.batches.count,
          block.pairs};
}

double ratio(std::int64_t a, std::int64_t b) {
  return static_cast<double>(a) / static_cast<double>(b);
}

double bytes_of(const RankPlan& plan, const Region& region, Content content) {
  const Buffer& buffer = plan.buffer(region.buffer);
  return static_cast<double>(region.tokens.count * region.heads.count * region.batches.count *
                             plan.width(buffer, content)) *
         static_cast<double>(size_of(buffer.dtype));
}

// The bytes of the first content, which is an output: the LSE and the maximum are negligible beside
// it.
double bytes_of(const RankPlan& plan, const Region& region) {
  return bytes_of(plan, region, plan.buffer(region.buffer).contents.front());
}

// Bytes of a bias, its gradient or a dense mask, if there is one. Kernels skip hidden entries.
double score_bytes(const RankPlan& plan, const Tile& block, int buffer) {
  if (buffer < 0 || block.pairs == 0) return 0;
  const Buffer& held = plan.buffer(buffer);
  const Region read = plan.scores_of(block, buffer);
  const bool has_columns = plan.width(held, held.contents.front()) > 1;
  return static_cast<double>(size_of(held.dtype)) * static_cast<double>(block.pairs) *
         static_cast<double>(read.heads.count) * ratio(read.batches.count, block.batches.count) *
         ratio(read.tokens.count, block.rows.count) *
         (has_columns ? 1 : ratio(1, block.columns.count));
}

double all_columns(const Tile& block) {
  return static_cast<double>(block.columns.count * block.batches.count);
}

// Bytes that a kernel must read at least once: K, V, bias and dense mask. With few rows, reading
// takes longer than computing.
double bytes_read(const RankPlan& plan, const Tile& block, double columns) {
  const auto kv_heads = static_cast<double>(plan.kv_heads_of(block.heads).count);
  return columns * kv_heads * static_cast<double>(plan.local.head_dim + plan.local.value_dim) *
             static_cast<double>(size_of(plan.buffer(block.key).dtype)) +
         score_bytes(plan, block, block.bias) + score_bytes(plan, block, block.dense_mask);
}

bool has_few_rows(const RankPlan& plan, const Block& block, const KernelCost& kernel) {
  const std::int64_t kv_heads = plan.kv_heads_of(block.heads).count;
  const std::int64_t rows = block.rows.count * block.batches.count;
  return (block.full || kernel.few_rows.banded) && !block.awaits_columns && kv_heads > 0 &&
         rows > 0 &&
         kernel.few_rows.include(block.rows.count, block.heads.count / kv_heads,
                                 block.heads.count * block.batches.count, block.pairs / rows);
}

}  // namespace

double seconds_of(const RankPlan& plan, const Block& block, const Prices& prices) {
  const KernelCost& kernel = prices.kernel(plan.implementation_of(block));
  // A kernel for few rows reads only the columns that they see; other kernels may read more.
  const bool few_rows = has_few_rows(plan, block, kernel);
  const double columns = few_rows ? ratio(block.pairs, block.rows.count) : all_columns(block);
  const double reading = prices.model.reading_seconds(bytes_read(plan, block, columns));
  double seconds = 0;
  if (few_rows) {
    // A second launch combines the parts.
    seconds = kernel.call_latency + prices.model.launch_seconds +
              std::max(reading, plan.flops(block) / kernel.few_rows.rate);
  } else {
    seconds =
        kernel.seconds(plan.flops(block), static_cast<double>(block.rows.count),
                       used_share(prices.model.device, extent_of(block), kernel.row_tile), reading);
  }
  if (block.state) {
    seconds += kPassesToContinue * prices.model.memory_seconds(bytes_of(plan, block.state->output));
  }
  return seconds;
}

double seconds_before_waiting(const RankPlan& plan, const Block& block, std::int64_t columns,
                              const Prices& prices) {
  const auto rows = static_cast<double>(block.rows.count * block.batches.count);
  const double at_once = std::min(1.0, longest_tile(extent_of(block)) * kRowsAtOnce /
                                           (rows * static_cast<double>(block.heads.count)));
  return seconds_of(plan, block, prices) * at_once * ratio(columns, block.columns.count);
}

double seconds_of(const RankPlan& plan, const Copy& copy, const Prices& prices) {
  return prices.model.memory_seconds(2 * bytes_of(plan, copy.to, copy.content));
}

double seconds_of_gradients(const RankPlan& plan, const Tile& tile, const Prices& prices) {
  const KernelCost& kernel = prices.kernel(plan.implementation_of(tile));
  const AttentionShape& local = plan.local;
  const std::int64_t kv_heads = plan.kv_heads_of(tile.heads).count;
  std::int64_t added = 0;
  if (tile.gradients.rows) added += tile.rows.count * tile.heads.count * local.head_dim;
  if (tile.gradients.columns) {
    added += tile.columns.count * kv_heads * (local.head_dim + local.value_dim);
  }
  const DType dtype = partial_dtype(plan.buffer(tile.key).dtype);
  const double adding = prices.model.memory_seconds(
      2 * static_cast<double>(tile.batches.count * added) * static_cast<double>(size_of(dtype)));
  const double reading = prices.model.reading_seconds(bytes_read(plan, tile, all_columns(tile)));
  const std::int64_t joined = kernel.joins_query_heads ? tile.heads.count / kv_heads : 1;
  return kernel.seconds(
      plan.backward_flops(tile), static_cast<double>(tile.rows.count),
      used_share_backward(prices.model.device, extent_of(tile), kernel.row_tile, joined),
      reading + adding);
}

double seconds_of(const RankPlan& plan, const BackwardBlock& block, const Prices& prices) {
  double added = 0;
  if (block.grad_bias.buffer >= 0) {
    // All batches and heads that share an entry add to it.
    const Region into = plan.scores_of(block, block.grad_bias.buffer);
    added = score_bytes(plan, block, block.grad_bias.buffer) *
            ratio(block.heads.count, into.heads.count) *
            ratio(block.batches.count, into.batches.count);
  }
  return seconds_of_gradients(plan, block, prices) + prices.model.memory_seconds(2 * added);
}

double seconds_of(const RankPlan& plan, const Delta& delta, const Prices& prices) {
  return prices.model.launch_seconds +
         prices.model.memory_seconds(2 * bytes_of(plan, delta.output));
}

double seconds_of(const RankPlan& plan, const SinkGradient& gradient, const Prices& prices) {
  return prices.model.launch_seconds +
         prices.model.memory_seconds(2 * bytes_of(plan, gradient.delta));
}

// One launch merges a softmax state. Sums take one launch for each content.
double seconds_of(const RankPlan& plan, const Reduce& reduce, const Prices& prices) {
  std::vector<Content> contents = plan.buffer(reduce.into.output.buffer).contents;
  if (reduce.reduction == Reduction::softmax) contents.resize(1);
  double seconds = 0;
  for (const Content content : contents) {
    double bytes = bytes_of(plan, reduce.into.output, content);
    for (const Result& part : reduce.parts) bytes += bytes_of(plan, part.output, content);
    seconds += prices.model.launch_seconds + prices.model.memory_seconds(bytes);
  }
  return seconds;
}

MessageCosts costs_of_messages(std::span<const double> bytes, bool across, const CostModel& model) {
  const CostCurve& curve = model.messages(across);
  MessageCosts costs{curve.at_zero(), {}};
  costs.seconds.reserve(bytes.size());
  double busy = 0;
  for (const double message : bytes) {
    costs.seconds.push_back(std::max(0.0, curve.extended(message) - costs.latency));
    busy += costs.seconds.back();
  }
  const double starts =
      transport_traits(model.transport).starts_once ? 1 : static_cast<double>(bytes.size());
  const double more = model.transfer_seconds(bytes, across) - starts * costs.latency - busy;
  if (more <= 0) return costs;
  for (double& seconds : costs.seconds) {
    seconds += busy > 0 ? more * seconds / busy : more / static_cast<double>(bytes.size());
  }
  return costs;
}

}  // namespace annulus::ring
