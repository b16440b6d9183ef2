#include "launcher/bench/bench_local.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <annulus/ring/block_scores.hpp>

namespace annulus::launcher {
namespace {

// Calls repeat(begin, count) until `count` tokens of a shard's `period` fill `length`. A shard
// without tokens leaves the memory as it is.
template <class Repeat>
void for_repeats(std::int64_t period, std::int64_t length, const Repeat& repeat) {
  for (std::int64_t begin = 0; period > 0 && begin < length; begin += period) {
    repeat(begin, std::min(period, length - begin));
  }
}

// The tokens of `shard` [b,s,k,D], repeated until there are `length`.
Tensor repeated(const ConstTensorView& shard, std::int64_t length, Device& device, Stream& stream) {
  Extents shape = shard.shape();
  shape[1] = length;
  Tensor result(shard.dtype(), shape, device.memory());
  for_repeats(shard.size(1), length, [&](std::int64_t begin, std::int64_t count) {
    device.copy(shard.slice(1, 0, count), result.view().slice(1, begin, count), stream);
  });
  return result;
}

}  // namespace

LocalBlocks::LocalBlocks(const AttentionProblem& problem, const Attention& attention,
                         const ring::LocalTensors& shards, Context& context)
    : problem_(problem),
      device_(context.device()),
      threads_(context.threads()),
      stream_(device_.make_stream("local", context.mesh().watchdog(), nullptr)) {
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
  query_ = repeated(shards.query, rows, device_, *stream_);
  lse_ = Tensor(DType::float32, {output_shape[0], output_shape[2], rows}, device_.memory());
  key_ = repeated(shards.key, longest, device_, *stream_);
  value_ = repeated(shards.value, longest, device_, *stream_);

  const auto scores_of = [&](const ring::Region& region) {
    const ring::Buffer& buffer = plan.buffer(region.buffer);
    const bool biases = buffer.contents.front() == ring::Content::bias;
    const ConstTensorView own = biases ? shards.bias : shards.mask;
    const ConstTensorView held = buffer.kind == ring::BufferKind::caller
                                     ? own
                                     : rows_of_others(plan, region.buffer, own).view();
    return held.slice(0, region.batches.begin, region.batches.count)
        .slice(1, region.heads.begin - buffer.heads.begin, region.heads.count)
        .slice(2, region.tokens.begin - buffer.tokens.begin, region.tokens.count);
  };
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
               ring::block_scores(plan, block, problem.shape.kv_length, scores_of)},
              {},
              nullptr};
    const Implementation& chosen = attention.implementation_of(block);
    std::unique_ptr<Kernel>& kernel = kernels_[&chosen];
    if (!kernel) kernel = chosen.make_kernel(problem_, device_);
    call.kernel = kernel.get();
    const auto state_of = [&](const ring::Result& result) -> SoftmaxState {
      const DType dtype = plan.buffer(result.output.buffer).dtype;
      Tensor& output = outputs_[dtype];
      if (output.shape().rank() == 0) {
        output = Tensor(dtype, output_shape, device_.memory());
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

// The rank's own rows, cut to the heads and keys of the buffer and repeated.
const Tensor& LocalBlocks::rows_of_others(const ring::RankPlan& plan, int buffer,
                                          const ConstTensorView& own) {
  const auto [entry, added] = scores_.try_emplace(buffer);
  Tensor& rows = entry->second;
  if (!added) return rows;
  const ring::Buffer& held = plan.buffer(buffer);
  rows = Tensor(held.dtype,
                {plan.batches(held).count, held.heads.count, held.tokens.count,
                 plan.width(held, held.contents.front())},
                device_.memory());
  const ConstTensorView heads = own.slice(1, held.heads.begin, held.heads.count);
  std::vector<TensorCopy> copies;
  for_repeats(own.size(2), held.tokens.count, [&](std::int64_t begin, std::int64_t count) {
    const ConstTensorView from = heads.slice(2, 0, count);
    const TensorView to = rows.view().slice(2, begin, count);
    if (held.columns) {
      ring::add_key_copies(from, *held.columns, to, copies);
    } else {
      copies.push_back({from, to});
    }
  });
  device_.copy(copies, *stream_);
  return rows;
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
    call.kernel->forward(call.block, call.result, {*stream_, stream_.get(), threads_});
  }
}

}  // namespace annulus::launcher
