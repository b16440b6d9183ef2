#include "flash/flash_attention.hpp"

#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include <annulus/attention/softmax_state_cuda.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/division.hpp>

#include "flash/argument_views.hpp"
#include "flash/has_modifiers.hpp"
#include "flash/head_dims.hpp"
#include "flash/small_tanh.hpp"
#include "flash/tensor_map.hpp"
#include "problem/block_checks.hpp"

namespace annulus::flash {
namespace {

// The keys and values of the heads computed at a time should stay in L2 (50 or 60 MB).
constexpr std::int64_t kSectionBytes = std::int64_t{36} << 20;

constexpr std::int64_t kVectorBytes = 16;
constexpr float kLog2E = 1.4426950408889634F;

template <int kHeadDim, int kValueDim, bool kHalf, MaskClass kMask>
KernelInfo pick(bool soft_cap) {
  return soft_cap ? kernel_info<kHeadDim, kValueDim, kHalf, kMask, true>()
                  : kernel_info<kHeadDim, kValueDim, kHalf, kMask, false>();
}

template <int kHeadDim, int kValueDim, bool kHalf>
KernelInfo pick(const AttentionProblem& problem, bool ids) {
  if (has_modifiers(problem)) {
    return kernel_info<kHeadDim, kValueDim, kHalf, MaskClass::general, false>();
  }
  const bool cap = problem.soft_cap.has_value();
  return ids ? pick<kHeadDim, kValueDim, kHalf, MaskClass::ids>(cap)
             : pick<kHeadDim, kValueDim, kHalf, MaskClass::position>(cap);
}

// Query heads, over all batches, that are computed at a time: the same number in each section.
std::int64_t heads_in_section(const AttentionBlock& block) {
  const std::int64_t bytes = block.key.size(1) * (block.key.size(3) + block.value.size(3)) *
                             static_cast<std::int64_t>(size_of(block.key.dtype()));
  const std::int64_t all = block.key.size(0) * block.key.size(2);
  const std::int64_t most = std::max<std::int64_t>(1, kSectionBytes / bytes);
  return ceil_divide(all, ceil_divide(all, most)) * (block.query.size(2) / block.key.size(2));
}

}  // namespace

KernelInfo find_kernel(const AttentionProblem& problem, bool ids) {
  if (problem.dtype == DType::float32) {
    const std::int64_t larger = std::max(problem.shape.head_dim, problem.shape.value_dim);
    if (larger <= 64) return float32_kernel_info<64>();
    return larger <= 128 ? float32_kernel_info<128>() : float32_kernel_info<256>();
  }
  return with_head_dims(problem.shape, [&]<class Dims>(Dims /*dims*/) {
    return problem.dtype == DType::float16
               ? pick<Dims::kHeadDim, Dims::kValueDim, true>(problem, ids)
               : pick<Dims::kHeadDim, Dims::kValueDim, false>(problem, ids);
  });
}

FlashAttention::FlashAttention(const AttentionProblem& problem, Device& device)
    : problem_(problem),
      device_(device),
      decode_(problem, device),
      multiprocessors_(cuda_multiprocessors(device.place())) {}

std::string FlashAttention::layout_obstacle(const char* name, const ConstTensorView& tensor) {
  if (tensor.stride(3) != 1) return fmt::format("the head dimension of {} has a stride", name);
  const auto vector = kVectorBytes / static_cast<std::int64_t>(size_of(tensor.dtype()));
  for (int dim = 0; dim < 3; ++dim) {
    if (tensor.size(dim) > 1 && (tensor.stride(dim) % vector != 0 || tensor.stride(dim) <= 0)) {
      return fmt::format("{} has strides {}, not positive multiples of {}", name,
                         to_string(tensor.strides()), vector);
    }
  }
  if (reinterpret_cast<std::uintptr_t>(tensor.data()) % kVectorBytes != 0) {
    return fmt::format("{} does not begin at a multiple of {} bytes", name, kVectorBytes);
  }
  return {};
}

void FlashAttention::prepare(const AttentionBlock& block) {
  if (block.query.elements() == 0 || block.key.elements() == 0) return;
  const auto current = device_.make_current();
  if (decode_.takes(block)) return decode_.prepare(block);
  (void)find(block);
}

FlashAttention::Entry& FlashAttention::find(const AttentionBlock& block) {
  for (Entry& entry : entries_) {
    if (entry.batches == block.query.size(0) && entry.heads == block.query.size(2) &&
        entry.unmasked == block.unmasked &&
        (block.unmasked && !has_modifiers(problem_)
             ? entry.rows.size() == block.rows.size() &&
                   entry.columns.size() == block.columns.size()
             : entry.first_batch == block.first_batch && entry.rows == block.rows &&
                   entry.columns == block.columns &&
                   (!problem_.mask.depends_on_head() || entry.first_head == block.first_head))) {
      return entry;
    }
  }
  entries_.push_back(make_entry(block));
  return entries_.back();
}

FlashAttention::Entry FlashAttention::make_entry(const AttentionBlock& block) {
  Entry entry;
  entry.rows = block.rows;
  entry.columns = block.columns;
  entry.first_batch = block.first_batch;
  entry.batches = block.query.size(0);
  entry.first_head = block.first_head;
  entry.heads = block.query.size(2);
  entry.unmasked = block.unmasked;

  // Tiles are the same whether ids are compared or not.
  entry.kernel = find_kernel(problem_, false);
  const bool masked = !block.unmasked;
  const Mask mask = masked ? mask_of_calls(problem_) : Mask();
  const bool placed = masked || has_modifiers(problem_);  // positions matter
  const ListPlan plan(mask, {entry.first_batch, entry.batches, entry.first_head, entry.heads},
                      placed ? block.rows : PositionRanges::all(block.rows.size()),
                      placed ? block.columns : PositionRanges::all(block.columns.size()),
                      entry.kernel.tile_rows, entry.kernel.tile_columns);
  if (plan.asked() == Asked::ids) entry.kernel = find_kernel(problem_, true);
  check_cuda(
      cudaFuncSetAttribute(entry.kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(entry.kernel.shared_bytes)),
      "cudaFuncSetAttribute");
  entry.batch_has_list = plan.batches() > 1;
  entry.head_has_list = plan.heads() > 1;
  entry.tiles_per_list = plan.tiles_per_list();
  entry.needs_repair =
      (plan.may_hide_values() || problem_.bias || problem_.dense_mask) && entry.kernel.persistent;
  entry.lists.emplace(plan, device_.memory());
  entry.lists->make(nullptr);
  entry.counters.push_back({std::nullopt, make_counters(entry, nullptr)});
  check_cuda(cudaStreamSynchronize(nullptr), "making work lists");
  return entry;
}

Tensor FlashAttention::make_counters(const Entry& entry, cudaStream_t stream) {
  const std::int64_t items = entry.batches * entry.heads * entry.tiles_per_list;
  Tensor counters(DType::int32, {kCounters + 1 + items}, device_.memory());
  check_cuda(cudaMemsetAsync(counters.view().data(), 0, counters.bytes(), stream),
             "cudaMemsetAsync");
  return counters;
}

// The first stream takes the ones that were made in advance.
const Tensor& FlashAttention::counters_for(Entry& entry, cudaStream_t stream) {
  for (Entry::Counters& counters : entry.counters) {
    if (counters.stream.value_or(stream) != stream) continue;
    counters.stream = stream;
    return counters.values;
  }
  entry.counters.push_back({stream, make_counters(entry, stream)});
  return entry.counters.back().values;
}

Arguments FlashAttention::arguments_of(const Entry& entry, const Tensor& counters,
                                       const AttentionBlock& block,
                                       const SoftmaxState& result) const {
  Arguments a;
  if (problem_.dtype != DType::float32) {
    a.query = tensor_map(block.query, 64);
    a.key = tensor_map(block.key, entry.kernel.tile_columns);
    a.value = tensor_map(block.value, entry.kernel.tile_columns);
  }
  a.tiles = entry.lists->tiles();
  a.segments = entry.lists->segments();
  a.tiles_per_list = entry.tiles_per_list;
  a.tile_columns = entry.kernel.tile_columns;
  a.batch_has_list = entry.batch_has_list ? 1 : 0;
  a.head_has_list = entry.head_has_list ? 1 : 0;
  a.batches = static_cast<std::int32_t>(entry.batches);
  a.heads = static_cast<std::int32_t>(entry.heads);
  a.heads_per_kv_head = static_cast<std::int32_t>(entry.heads / block.key.size(2));
  a.section_heads = static_cast<std::int32_t>(heads_in_section(block));
  a.counters = static_cast<std::int32_t*>(counters.view().data());
  a.repair = a.counters + kCounters;
  a.row_keys = entry.lists->row_keys();
  a.row_ids = entry.lists->row_ids();
  a.column_ids = entry.lists->column_ids();
  a.rows = static_cast<std::int32_t>(block.query.size(1));
  a.columns = static_cast<std::int32_t>(block.key.size(1));
  a.scores = cuda::score_arguments(block.scores);
  if (problem_.dropout) {
    a.dropout = cuda::dropout_arguments(*problem_.dropout, block.first_batch, block.first_head);
    a.dropout.called_key = block.call_arguments.dropout_key;
    a.value_scale = a.dropout.keep_scale;
  }
  a.scale = static_cast<float>(problem_.logit_scale());
  if (problem_.soft_cap) {
    a.soft_cap = SmallTanh::computable(*problem_.soft_cap);
    a.scale = static_cast<float>(problem_.logit_scale() / a.soft_cap);
    const SmallTanh small(a.scale, a.soft_cap);
    std::copy_n(small.plain, 3, a.small_tanh);
    std::copy_n(small.scaled, 3, a.scaled_small_tanh);
    a.small_tanh_limit = small.limit;
    a.accurate_tanh = SmallTanh::needs_accuracy(a.soft_cap) ? 1 : 0;
  }
  const float exponents = kLog2E * (problem_.soft_cap ? a.soft_cap : a.scale);
  a.exponent_scale = problem_.bias ? kBiasedExponentScale : exponents;
  a.scale_beside_bias = exponents / kBiasedExponentScale;
  a.no_maximum = -std::numeric_limits<float>::max() / 2 / std::max(1.0F, a.exponent_scale);
  a.result = result_of(result);
  a.wide_output = result.output.dtype() == DType::float32 ? 1 : 0;
  if (block.state) a.state = result_of(*block.state);
  a.value_dim = static_cast<std::int32_t>(block.value.size(3));
  a.arrived_from = block.arrived_from;
  return a;
}

void FlashAttention::run(const AttentionBlock& block, const SoftmaxState& result, Stream& stream) {
  const BlockChecks checks("flash attention", problem_);
  checks.check(block, result);
  checks.require(block.arrived_from == nullptr || problem_.dtype != DType::float32,
                 "columns of float32 must have arrived before the call");
  if (block.query.elements() == 0) return;
  if (block.key.elements() == 0) {
    if (!block.state) return cuda::reset(result, stream);
    const PartialState part{*block.state};
    return cuda::combine({&part, 1}, result, stream);
  }
  const auto current = device_.make_current();
  if (decode_.takes(block)) return decode_.run(block, result, stream);
  Entry& entry = find(block);
  auto* const raw = CudaStream::of(stream).raw();
  if (problem_.call_arguments.change_visibility() && !block.unmasked) {
    entry.lists->make(raw, block.call_arguments, block.first_batch);
  }
  Arguments arguments = arguments_of(entry, counters_for(entry, raw), block, result);
  const std::int64_t items = entry.batches * entry.heads * entry.tiles_per_list;
  const auto blocks = static_cast<unsigned>(
      entry.kernel.persistent ? std::min<std::int64_t>(multiprocessors_, items) : items);
  Operands operands = operands_of(block.query, block.key, block.value);
  void* parameters[] = {&arguments, &operands};
  check_cuda(cudaLaunchKernel(entry.kernel.function, dim3(blocks),
                              dim3(static_cast<unsigned>(entry.kernel.threads)), parameters,
                              entry.kernel.shared_bytes, raw),
             "launching flash attention");
  if (!entry.needs_repair) return;
  check_cuda(
      launch_repair(arguments, operands, problem_.dtype == DType::float16, multiprocessors_, raw),
      "launching the repair of flash attention");
}

}  // namespace annulus::flash
