#include "flash/decode/decode_attention.hpp"

#include <algorithm>
#include <cstdlib>
#include <span>

#include <annulus/attention/local_mask.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>

#include "cuda/upload.hpp"
#include "flash/argument_views.hpp"
#include "flash/decode/batch_keys.hpp"
#include "flash/head_dims.hpp"
#include "flash/small_tanh.hpp"
#include "mask/position_runs.hpp"

namespace annulus::flash::decode {
namespace {

DecodeKernel find_kernel(const AttentionProblem& problem) {
  return with_head_dims(problem.shape, [&]<class Dims>(Dims /*dims*/) {
    return problem.dtype == DType::float16
               ? decode_kernel<Dims::kHeadDim, Dims::kValueDim, true>()
               : decode_kernel<Dims::kHeadDim, Dims::kValueDim, false>();
  });
}

// Rows of the heads that share a key/value head.
std::int64_t rows_of(const AttentionBlock& block) {
  return block.query.size(1) * (block.query.size(2) / block.key.size(2));
}

// True if the positions follow each other without gaps.
bool are_neighbours(const PositionRanges& positions) {
  const PositionRuns runs = runs_of(positions);
  return runs.size() == 1 && (runs.front().range.length == 1 || runs.front().range.stride == 1);
}

std::int64_t first_of(const PositionRanges& positions) {
  return positions.ranges().front().start.value();
}

// A side of a band of positions, in local indices.
std::int64_t local_side(std::int64_t side, std::int64_t unlimited, std::int64_t shift) {
  return side == unlimited ? unlimited : side + shift;
}

bool is_beyond(std::int64_t side, std::int64_t unlimited) {
  return side != unlimited && std::abs(side) >= BatchKeys::kFar;
}

Tensor upload_keys(std::span<const BatchKeys> keys, MemoryPool& memory) {
  return upload({reinterpret_cast<const std::int32_t*>(keys.data()),
                 keys.size_bytes() / sizeof(std::int32_t)},
                memory);
}

}  // namespace

bool DecodeAttention::includes(const AttentionBlock& block, std::int64_t columns) const {
  return few_rows_.include(block.query.size(1), block.query.size(2) / block.key.size(2),
                           block.query.size(0) * block.query.size(2), columns);
}

void DecodeAttention::prepare(const AttentionBlock& block) {
  (void)find(block);
}

const DecodeAttention::Entry* DecodeAttention::find(const AttentionBlock& block) {
  if (block.arrived_from != nullptr || !includes(block, block.key.size(1))) return nullptr;
  if (!block.unmasked && !few_rows_.banded) return nullptr;
  const auto known = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.query == block.query.shape() && entry.key == block.key.shape() &&
           entry.unmasked == block.unmasked &&
           (block.unmasked || (entry.first_batch == block.first_batch && entry.rows == block.rows &&
                               entry.columns == block.columns));
  });
  const Entry& entry = known != entries_.end() ? *known : entries_.emplace_back(make_entry(block));
  return entry.kernel.function != nullptr ? &entry : nullptr;
}

LocalMask DecodeAttention::planned_mask(const AttentionBlock& block) const {
  const std::int64_t batches = block.key.size(0);
  if (!problem_.call_arguments.change_visibility()) {
    return local_mask(problem_.mask, block.first_batch, batches, block.rows, block.columns);
  }
  // Without what calls change. A call has the values of its own in the problem's mask.
  Mask straight = problem_.mask;
  straight.set_query_lengths({});
  straight.set_kv_lengths({});
  if (problem_.call_arguments.offsets) straight.set_offset(0);
  LocalMask local;
  if (straight.depends_on_batch() || !straight.one_band() || !are_neighbours(block.rows) ||
      !are_neighbours(block.columns)) {
    local.obstacle = "calls move a mask that no band describes";
    return local;
  }
  const Band band = straight.band();
  const std::int64_t shift = first_of(block.rows) - first_of(block.columns);
  local.band.low = local_side(band.low, -Band::kUnlimited, shift);
  local.band.high = local_side(band.high, Band::kUnlimited, shift);
  if (is_beyond(local.band.low, -Band::kUnlimited) ||
      is_beyond(local.band.high, Band::kUnlimited)) {
    local.obstacle = "calls move a window that is longer than any sequence";
    return local;
  }
  const auto within = [&](const std::vector<std::int32_t>& lengths, const PositionRanges& of) {
    std::vector<std::int32_t> result;
    for (std::int64_t b = block.first_batch; b < block.first_batch + batches; ++b) {
      const std::int64_t length =
          lengths.empty() ? of.size() : lengths[static_cast<std::size_t>(b)] - first_of(of);
      result.push_back(static_cast<std::int32_t>(std::clamp<std::int64_t>(length, 0, of.size())));
    }
    return result;
  };
  local.row_lengths = within(problem_.mask.query_lengths(), block.rows);
  local.column_lengths = within(problem_.mask.kv_lengths(), block.columns);
  return local;
}

DecodeAttention::Entry DecodeAttention::make_entry(const AttentionBlock& block) {
  Entry entry;
  entry.query = block.query.shape();
  entry.key = block.key.shape();
  entry.unmasked = block.unmasked;
  entry.rows = block.rows;
  entry.columns = block.columns;
  entry.first_batch = block.first_batch;
  const DecodeKernel kernel = find_kernel(problem_);
  const std::int64_t batches = block.key.size(0);
  const std::int64_t columns = block.key.size(1);
  entry.split.batches = batches;
  entry.split.kv_heads = block.key.size(2);
  if (block.unmasked) {
    entry.split.tiles = entry.split.pairs() * kernel.most_tiles(columns);
  } else {
    const LocalMask mask = planned_mask(block);
    if (!mask.obstacle.empty()) return entry;
    const std::int64_t rows = block.query.size(1);
    MaskedKeys keys = masked_keys(mask, batches, rows, columns, kernel.tile_columns);
    const bool changes = problem_.call_arguments.change_visibility();
    if (!includes(block, changes ? columns : keys.pairs / (batches * rows))) return entry;
    entry.keys = upload_keys(keys.batches, device_.memory());
    entry.split.keys = reinterpret_cast<const BatchKeys*>(entry.keys.view().data());
    entry.split.tiles = entry.split.kv_heads * keys.batches.back().first_tile;
    if (changes) {
      for (std::size_t b = 0; b < mask.row_lengths.size(); ++b) {
        keys.batches[b].rows = mask.row_lengths[b];  // as they were before any were taken away
      }
      entry.planned = upload_keys(keys.batches, device_.memory());
      entry.split.tiles = entry.split.pairs() * kernel.most_tiles(columns);
    }
  }
  entry.kernel = kernel;
  check_cuda(
      cudaFuncSetAttribute(entry.kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(entry.kernel.shared_bytes)),
      "cudaFuncSetAttribute");
  entry.split.blocks =
      std::min<std::int64_t>(cuda_multiprocessors(device_.place()), entry.split.tiles);
  const std::int64_t rows = entry.split.parts() * rows_of(block);
  workspace_.reserve(static_cast<std::size_t>(rows * (block.value.size(3) + 2)) * sizeof(float));
  return entry;
}

void DecodeAttention::make_keys(const Entry& entry, const AttentionBlock& block,
                                cudaStream_t stream) const {
  const CallArgumentArrays& called = block.call_arguments;
  const auto from = [&](const std::int32_t* of_all) {
    return of_all == nullptr ? nullptr : of_all + block.first_batch;
  };
  CallKeys call;
  call.planned = reinterpret_cast<const BatchKeys*>(entry.planned.view().data());
  call.query_lengths = from(called.query_lengths);
  call.kv_lengths = from(called.kv_lengths);
  if (problem_.call_arguments.offsets) {
    call.offsets = from(called.offsets);
    call.offset = static_cast<std::int32_t>(problem_.mask.offset());
  }
  call.batches = static_cast<std::int32_t>(entry.split.batches);
  call.rows = static_cast<std::int32_t>(block.rows.size());
  call.columns = static_cast<std::int32_t>(block.columns.size());
  call.first_row = static_cast<std::int32_t>(first_of(block.rows));
  call.first_column = static_cast<std::int32_t>(first_of(block.columns));
  call.tile_columns = entry.kernel.tile_columns;
  check_cuda(launch_call_keys(call, reinterpret_cast<BatchKeys*>(entry.keys.view().data()), stream),
             "sharing out the keys of a call among few rows");
}

void DecodeAttention::run(const AttentionBlock& block, const SoftmaxState& result, Stream& stream) {
  const Entry& entry = *find(block);
  constexpr float kLog2E = 1.4426950408889634F;
  const std::int64_t heads_per_kv_head = block.query.size(2) / block.key.size(2);
  DecodeArguments a;
  a.tensors = operands_of(block.query, block.key, block.value);
  a.rows = static_cast<std::int32_t>(rows_of(block));
  a.heads_per_kv_head = static_cast<std::int32_t>(heads_per_kv_head);
  a.kv_heads = static_cast<std::int32_t>(block.key.size(2));
  a.columns = static_cast<std::int32_t>(block.key.size(1));
  a.value_dim = static_cast<std::int32_t>(block.value.size(3));
  a.split = entry.split;
  a.scale = static_cast<float>(problem_.logit_scale());
  if (problem_.soft_cap) {
    const float cap = SmallTanh::computable(*problem_.soft_cap);
    a.scale = static_cast<float>(problem_.logit_scale() / cap);
    a.soft_cap = cap * kLog2E;
  } else {
    a.scale *= kLog2E;
  }
  a.part_outputs = static_cast<float*>(workspace_.data());
  a.part_weights =
      reinterpret_cast<float2*>(a.part_outputs + a.split.parts() * a.rows * a.value_dim);
  a.result = result_of(result);
  a.wide_output = result.output.dtype() == DType::float32 ? 1 : 0;
  if (block.state) a.state = result_of(*block.state);
  auto* const raw = CudaStream::of(stream).raw();
  if (entry.planned.view().data() != nullptr) make_keys(entry, block, raw);
  void* parameters[] = {&a};
  check_cuda(cudaLaunchKernel(entry.kernel.function, dim3(static_cast<unsigned>(a.split.blocks)),
                              dim3(static_cast<unsigned>(entry.kernel.threads)), parameters,
                              entry.kernel.shared_bytes, raw),
             "launching the flash kernel for few rows");
  check_cuda(launch_merge(a, problem_.dtype == DType::float16, raw),
             "launching the merge of the flash kernel for few rows");
}

}  // namespace annulus::flash::decode
