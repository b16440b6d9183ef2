#include "launcher/bench/bench_local.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace annulus::launcher {
namespace {

// The tokens of `shard` [b,s,k,D], repeated until there are `length`. A shard without tokens leaves
// the memory as it is.
Tensor repeated(const ConstTensorView& shard, std::int64_t length, Device& device, Stream& stream) {
  Extents shape = shard.shape();
  const std::int64_t period = shape[1];
  shape[1] = length;
  Tensor result(shard.dtype(), shape, device.memory());
  for (std::int64_t begin = 0; period > 0 && begin < length; begin += period) {
    const std::int64_t count = std::min(period, length - begin);
    device.copy(shard.slice(1, 0, count), result.view().slice(1, begin, count), stream);
  }
  return result;
}

}  // namespace

LocalBlocks::LocalBlocks(const AttentionProblem& problem, const ring::ShardedAttention& attention,
                         const ring::LocalTensors& shards, Device& device, Watchdog watchdog,
                         int threads)
    : problem_(problem),
      device_(device),
      threads_(threads),
      stream_(device.make_stream("local", std::move(watchdog), nullptr)) {
  const ring::RankPlan& plan = attention.rank_plan();
  const std::vector<const ring::Block*> blocks = plan.all<ring::Block>();
  std::int64_t longest = 0;
  std::int64_t rows = plan.local.query_length;
  for (const ring::Block* block : blocks) {
    longest = std::max(longest, block->columns.count);
    rows = std::max(rows, block->rows.end().value());
  }
  Extents output_shape = shards.output.shape();
  output_shape[1] = rows;
  query_ = repeated(shards.query, rows, device, *stream_);
  lse_ = Tensor(DType::float32, {output_shape[0], output_shape[2], rows}, device.memory());
  key_ = repeated(shards.key, longest, device, *stream_);
  value_ = repeated(shards.value, longest, device, *stream_);

  const ScoreTensors scores =
      broadcast_scores(shards.bias, shards.mask,
                       {plan.local.batch, plan.local.heads, rows, problem.shape.kv_length});
  for (const ring::Block* one : blocks) {
    const ring::Block& block = *one;
    const auto in_batches = [&](const auto& view) {
      return view.slice(0, block.batches.begin, block.batches.count);
    };
    const ring::HeadRange kv_heads = plan.kv_heads_of(block.heads);
    const auto columns = [&](const Tensor& tensor) {
      return in_batches(tensor.view())
          .slice(1, 0, block.columns.count)
          .slice(2, kv_heads.begin, kv_heads.count);
    };
    const std::int64_t row = block.rows.begin.value();
    Call call{{in_batches(query_.view())
                   .slice(1, row, block.rows.count)
                   .slice(2, block.heads.begin, block.heads.count),
               columns(key_),
               columns(value_),
               block.row_positions,
               block.column_positions,
               plan.first_batch + block.batches.begin,
               plan.first_head + block.heads.begin,
               block.full,
               {},
               scores.slice(0, block.batches.begin, block.batches.count)
                   .slice(1, block.heads.begin, block.heads.count)
                   .slice(2, row, block.rows.count)},
              {},
              nullptr};
    const Implementation& chosen = attention.implementation_of(block);
    std::unique_ptr<Kernel>& kernel = kernels_[&chosen];
    if (!kernel) kernel = chosen.make_kernel(problem_, device);
    call.kernel = kernel.get();
    const auto state_of = [&](const ring::Result& result) -> SoftmaxState {
      const DType dtype = plan.buffer(result.output.buffer).dtype;
      Tensor& output = outputs_[dtype];
      if (output.shape().rank() == 0) {
        output = Tensor(dtype, output_shape, device.memory());
      }
      return {in_batches(output.view())
                  .slice(1, row, block.rows.count)
                  .slice(2, block.heads.begin, block.heads.count),
              in_batches(lse_.view())
                  .slice(1, block.heads.begin, block.heads.count)
                  .slice(2, row, block.rows.count)};
    };
    call.result = state_of(block.result);
    if (block.state) call.block.state = state_of(*block.state);
    call.kernel->prepare(call.block, call.result);
    calls_.push_back(std::move(call));
  }
}

void LocalBlocks::run() {
  if (warm_ && !recording_) recording_ = device_.record(*stream_, [this] { submit(); });
  if (recording_) {
    recording_->submit(*stream_);
  } else {
    submit();
  }
  warm_ = true;
  stream_->synchronize();
}

void LocalBlocks::submit() {
  for (const Call& call : calls_) {
    call.kernel->forward(call.block, call.result, {*stream_, nullptr, threads_});
  }
}

}  // namespace annulus::launcher
