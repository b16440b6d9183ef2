#include "flash/backward/flash_backward.hpp"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include <annulus/attention/local_mask.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/division.hpp>
#include <annulus/core/error.hpp>

#include "cuda/upload.hpp"
#include "flash/argument_views.hpp"
#include "flash/backward/kernels.hpp"
#include "flash/backward/score_gradients.hpp"
#include "flash/flash_attention.hpp"
#include "flash/float32/backward/kernels.hpp"
#include "flash/has_modifiers.hpp"
#include "flash/head_dims.hpp"
#include "flash/small_tanh.hpp"
#include "flash/tensor_map.hpp"
#include "problem/block_checks.hpp"

namespace annulus::flash::backward {
namespace {

// Queries, dO and sums of dQ of the heads computed at a time should stay in L2 (50 or 60 MB).
constexpr double kSectionBytes = 36 << 20;
// A window is narrow if its width is at most this fraction of the rows. Few key tiles then reach
// past the last row and have fewer steps than others.
constexpr double kNarrow = 0.25;
// Larger than any distance, and small enough that sums of two do not overflow.
constexpr std::int64_t kFar = std::int64_t{1} << 29;

int tile_dim(const AttentionProblem& problem) {
  return with_head_dims(problem.shape, [](auto dims) { return decltype(dims)::kHeadDim; });
}

bool is_float32(const AttentionProblem& problem) {
  return problem.dtype == DType::float32;
}
bool is_float16(const AttentionProblem& problem) {
  return problem.dtype == DType::float16;
}

bool has_wide_kernels(const AttentionProblem& problem) {
  return !is_float32(problem) && is_wide(tile_dim(problem));
}

bool has_narrow_kernels(const AttentionProblem& problem) {
  return !is_float32(problem) && !is_wide(tile_dim(problem));
}

// True if key tiles add to dQ in a fixed order. Only kernels of narrow heads add to a shared dQ.
bool takes_turns(const AttentionProblem& problem, const BackwardBlock& block) {
  return block.repeats_bits && has_narrow_kernels(problem);
}

// True if the problem needs the general class. Only narrow heads have a class for dropout alone.
bool needs_general_class(const AttentionProblem& problem) {
  return has_modifiers(problem) &&
         (!has_narrow_kernels(problem) || problem.bias || problem.dense_mask || problem.soft_cap);
}

int rows_of_tile(const AttentionProblem& problem) {
  return is_float32(problem)
             ? kFloat32Tile
             : tile_queries(tile_dim(problem),
                            needs_general_class(problem) ? PairClass::general : PairClass::lists);
}

int keys_of_tile(const AttentionProblem& problem) {
  return is_float32(problem) ? kFloat32Tile : tile_keys(tile_dim(problem));
}

bool is_wanted(const TensorView& gradient) {
  return gradient.shape().rank() > 0;
}

bool is_empty(const BackwardBlock& block) {
  return block.query.elements() == 0 || block.key.elements() == 0;
}

RowTensor rows_of(const ConstTensorView& tensor) {
  return {tensor.data(), strides_of(tensor), static_cast<std::int32_t>(tensor.size(3))};
}

Gradient gradient_of(const TensorView& tensor) {
  if (!is_wanted(tensor)) return {};
  return {static_cast<float*>(tensor.data()), strides_of(tensor),
          static_cast<std::int32_t>(tensor.size(3))};
}

RowValues row_values_of(const ConstTensorView& tensor) {
  return {static_cast<const float*>(tensor.data()), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

void require(const char* name, const ConstTensorView& tensor) {
  const std::string obstacle = FlashAttention::layout_obstacle(name, tensor);
  if (!obstacle.empty()) throw UnsupportedError("flash attention, backward: " + obstacle);
}

// All that share an entry add a term to it, in any order.
void require_own_entries(const TensorView& bias, const BackwardBlock& block) {
  const auto is_shared = [&](int dim) { return bias.size(dim) > 1 && bias.stride(dim) == 0; };
  if (bias.stride(3) == 0 && block.key.size(1) > 1) {
    throw UnsupportedError("flash attention, backward: the bias's gradient is a sum over keys");
  }
  if (block.repeats_bits && (is_shared(0) || is_shared(1) || is_shared(2))) {
    throw UnsupportedError(
        "flash attention, backward: the bias's gradient is a sum over batches, heads or rows, "
        "which are added in a varying order");
  }
}

// A bias or mask [b,n,t,key] as [b,t,n,key], in which broadcast batches and heads have size 1.
ConstTensorView by_rows(const ConstTensorView& scores) {
  const auto size = [&](int dim) { return scores.stride(dim) == 0 ? 1 : scores.size(dim); };
  return {scores.data(), scores.dtype(), Extents{size(0), scores.size(2), size(1), scores.size(3)},
          Extents{scores.stride(0), scores.stride(2), scores.stride(1), scores.stride(3)},
          scores.place()};
}

// True if TMA can copy boxes of a bias or mask.
bool has_boxes(const ConstTensorView& scores) {
  constexpr std::int64_t kAlignment = 16;
  const auto fits = [&](int dim) {
    const std::int64_t stride = scores.stride(dim);
    return stride >= 0 &&
           stride * static_cast<std::int64_t>(size_of(scores.dtype())) % kAlignment == 0;
  };
  return scores.stride(3) == 1 && fits(0) && fits(1) && fits(2) &&
         reinterpret_cast<std::uintptr_t>(scores.data()) % kAlignment == 0;
}

// Sets the boxes in which TMA copies the bias and adds its gradient, or copies the mask, if it can.
void set_score_boxes(Arguments& a, const ScoreTensors& scores, const TensorView& grad_bias) {
  const ConstTensorView& copied = scores.bias ? *scores.bias : *scores.mask;
  if (!has_boxes(copied)) return;
  if (is_wanted(grad_bias)) {
    if (!has_boxes(grad_bias)) return;
    a.bias_gradient_boxes = tensor_map(by_rows(grad_bias), kBoxRows);
  }
  a.score_boxes = tensor_map(by_rows(copied), kBoxRows);
  a.has_score_boxes = true;
}

const std::int32_t* lengths_in(const Tensor& tensor) {
  return tensor.shape().rank() == 0 ? nullptr
                                    : static_cast<const std::int32_t*>(tensor.view().data());
}

}  // namespace

void FlashBackward::prepare(const BackwardBlock& block, const Gradients& gradients) {
  require("query", block.query);
  require("key", block.key);
  require("value", block.value);
  require("the output's gradient", block.grad_output);
  if (is_wanted(gradients.query)) require("the query's gradient", gradients.query);
  if (is_wanted(gradients.key)) require("the key's gradient", gradients.key);
  if (is_wanted(gradients.value)) require("the value's gradient", gradients.value);
  if (is_wanted(gradients.bias)) require_own_entries(gradients.bias, block);
  if (is_empty(block)) return;
  const auto current = device_.make_current();
  (void)arguments_of(block, gradients);
}

const FlashBackward::Entry& FlashBackward::find(const BackwardBlock& block) {
  const auto same = [&](const Entry& entry) {
    return entry.of.first_batch == block.first_batch && entry.of.batches == block.query.size(0) &&
           entry.rows == block.rows && entry.columns == block.columns &&
           entry.unmasked == block.unmasked &&
           (!problem_.mask.depends_on_head() ||
            (entry.of.first_head == block.first_head && entry.of.heads == block.query.size(2)));
  };
  const auto found = std::find_if(entries_.begin(), entries_.end(), same);
  return found != entries_.end() ? *found : entries_.emplace_back(make_entry(block));
}

FlashBackward::Entry FlashBackward::make_entry(const BackwardBlock& block) const {
  Entry entry{block.rows,
              block.columns,
              {block.first_batch, block.query.size(0), block.first_head, block.query.size(2)},
              block.unmasked};
  const auto make_lists = [&](const Mask& mask) {
    entry.lists = std::make_unique<TileLists>(
        mask, entry.of, block.rows, block.columns, rows_of_tile(problem_), keys_of_tile(problem_),
        has_modifiers(problem_), has_wide_kernels(problem_), device_.memory());
  };
  if (has_modifiers(problem_)) {
    make_lists(block.unmasked ? Mask() : problem_.mask);
    return entry;
  }
  const LocalMask mask =
      local_mask(problem_.mask, block.first_batch, entry.of.batches, block.rows, block.columns);
  if (!mask.obstacle.empty()) {
    make_lists(problem_.mask);
    return entry;
  }
  entry.low = static_cast<std::int32_t>(std::clamp(mask.band.low, -kFar, kFar));
  entry.high = static_cast<std::int32_t>(std::clamp(mask.band.high, -kFar, kFar));
  // An empty band moves out of reach. Otherwise kernels would visit the tiles between its ends.
  if (entry.low > entry.high) entry.low = entry.high = -static_cast<std::int32_t>(kFar);
  entry.row_lengths = upload(mask.row_lengths, device_.memory());
  entry.column_lengths = upload(mask.column_lengths, device_.memory());
  return entry;
}

FlashBackward::Extent FlashBackward::set_mask(Arguments& a, const BackwardBlock& block) {
  Extent seen{static_cast<double>(a.padded_rows), ceil_divide(a.columns, kWideTileKeys)};
  a.low = -static_cast<std::int32_t>(kFar);
  a.high = static_cast<std::int32_t>(kFar);
  if (!block.unmasked || has_modifiers(problem_)) {
    const Entry& entry = find(block);
    a.low = entry.low;
    a.high = entry.high;
    a.row_lengths = lengths_in(entry.row_lengths);
    a.column_lengths = lengths_in(entry.column_lengths);
    if (entry.lists) {
      a.mask = entry.lists->mask();
      seen = {entry.lists->rows_at_a_time(), entry.lists->most_keys()};
    } else {
      const std::int64_t width = std::int64_t{a.high} - a.low;
      const std::int64_t in_band = (kWideTileKeys - 1 + width) / kWideTileKeys + 2;
      const std::int64_t before_end = (a.padded_rows - 1 + a.high) / kWideTileKeys + 1;
      seen.key_tiles = std::min({seen.key_tiles, in_band, before_end});
    }
  }
  return seen;
}

void FlashBackward::set_order(Arguments& a, double rows_at_a_time, bool in_turns) const {
  // Under a narrow window, nearly all key tiles have equally many steps, so they keep pace head by
  // head too. The rows of all heads of a group at a time would not stay in L2. If bits must not
  // depend on ranks, lists and bands need one order.
  const bool is_narrow =
      a.mask.key_tiles == 0 && static_cast<double>(a.high) - a.low <= kNarrow * a.rows;
  a.heads_inside = in_turns && (problem_.in_global_order() || !is_narrow);
  // Sections of one size: a small last one would end with idle multiprocessors.
  const std::int64_t pairs = std::int64_t{a.batches} * (a.heads / a.heads_per_kv_head);
  const double fitting_heads = kSectionBytes / (rows_at_a_time * tile_dim(problem_) * 8);
  const auto most =
      static_cast<std::int64_t>(std::clamp(fitting_heads, 1.0, static_cast<double>(pairs)));
  a.section_heads = static_cast<std::int32_t>(ceil_divide(pairs, ceil_divide(pairs, most)));
  // True if all key tiles have equally many steps.
  const bool is_full = a.mask.key_tiles == 0 && a.row_lengths == nullptr &&
                       a.column_lengths == nullptr && a.low <= 1 - a.rows &&
                       a.high >= a.columns - 1;
  // Blocks of split items are at different rows of a head, so all its rows must stay in L2. With
  // several query heads in a group, they would also be at different heads, and the rows would not.
  if (has_narrow_kernels(problem_) && !in_turns && is_full && fitting_heads >= 1 &&
      a.heads_per_kv_head == 1 && pairs * ceil_divide(a.columns, kTileKeys) >= multiprocessors_) {
    a.split_items = multiprocessors_;
  }
}

void FlashBackward::set_workspace(Arguments& a, const BackwardBlock& block, bool wants_query) {
  const std::int64_t tile = rows_of_tile(problem_);
  const std::int64_t rows = std::int64_t{a.batches} * a.heads * a.padded_rows;
  std::int64_t bytes = 0;
  const auto add = [&](std::int64_t more) {
    constexpr std::int64_t kAlignment = 256;
    return std::exchange(bytes, round_up(bytes + more, kAlignment));
  };
  constexpr std::int64_t kFloat = sizeof(float);
  const std::int64_t lse_at = add(rows / tile * (tile + kFlagValues) * kFloat);
  const std::int64_t delta_at = add(rows * kFloat);
  // Even without dQ: the bits of dK and dV depend on the order of steps.
  const std::int64_t turns = takes_turns(problem_, block) ? rows / tile : 0;
  const std::int64_t turns_at = add((turns + 1) * std::int64_t{sizeof(std::int32_t)});
  const std::int64_t copied = is_float16(problem_) ? 2 * block.grad_output.elements() : 0;
  const std::int64_t scale_at = add(sizeof(OutputScale));
  const std::int64_t copy_at = add(copied);
  const std::int64_t scores_at = bytes;
  if (wants_query && has_wide_kernels(problem_)) {
    // Rounded up, so that a slightly larger block needs no second workspace.
    const std::int64_t least = bytes_of(a.grad_scores);
    const auto unit =
        static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(least)) / 8);
    bytes += std::max(least, std::min(round_up(least, unit), score_gradient_bytes));
  }
  workspace_.reserve(static_cast<std::size_t>(bytes));
  auto* const workspace = static_cast<std::byte*>(workspace_.data());
  a.scaled_lse = reinterpret_cast<float*>(workspace + lse_at);
  a.padded_delta = reinterpret_cast<float*>(workspace + delta_at);
  if (turns > 0) {
    a.turns = reinterpret_cast<std::int32_t*>(workspace + turns_at);
    a.next_index = a.turns + turns;
  }
  if (copied > 0) {
    a.output_scale = reinterpret_cast<OutputScale*>(workspace + scale_at);
    a.scaled_grad_output = workspace + copy_at;
  }
  if (bytes > scores_at) a.grad_scores.tiles = workspace + scores_at;
}

Arguments FlashBackward::arguments_of(const BackwardBlock& block, const Gradients& gradients) {
  const BlockChecks checks("flash attention, backward", problem_);
  checks.check(block, gradients);
  checks.require(block.query.size(3) == problem_.shape.head_dim &&
                     block.value.size(3) == problem_.shape.value_dim,
                 "the head dimensions belong to another problem");
  checks.require(!problem_.bias || !problem_.soft_cap, "a bias beside a soft cap");
  const Extents& query = block.query.shape();
  const Extents& key = block.key.shape();
  const int dim = tile_dim(problem_);
  const std::int64_t tile = rows_of_tile(problem_);
  Arguments a;
  a.batches = static_cast<std::int32_t>(query[0]);
  a.heads = static_cast<std::int32_t>(query[2]);
  a.heads_per_kv_head = static_cast<std::int32_t>(query[2] / key[2]);
  a.rows = static_cast<std::int32_t>(query[1]);
  a.columns = static_cast<std::int32_t>(key[1]);
  a.padded_rows = static_cast<std::int32_t>(round_up(query[1], tile));
  const Extent seen = set_mask(a, block);
  set_order(a, seen.rows_at_a_time, takes_turns(problem_, block));
  if (has_wide_kernels(problem_)) {
    // Even without dQ: the bits of dK and dV depend on the parts.
    a.grad_scores = divide_into_parts(a, seen.key_tiles, score_gradient_bytes);
  }
  set_workspace(a, block, is_wanted(gradients.query));
  if (!is_float32(problem_)) {
    a.query = tensor_map(block.query, static_cast<int>(tile));
    ConstTensorView grad_output = block.grad_output;
    if (a.scaled_grad_output != nullptr) {
      grad_output = ConstTensorView(a.scaled_grad_output, DType::float16, grad_output.shape(),
                                    contiguous_strides(grad_output.shape()), grad_output.place());
    }
    a.grad_output = tensor_map(grad_output, static_cast<int>(tile));
    a.key = tensor_map(block.key, tile_keys(dim));
    a.value = tensor_map(block.value, tile_keys(dim));
  }
  a.lse = row_values_of(block.lse);
  a.delta = row_values_of(block.delta);
  if (has_narrow_kernels(problem_)) {
    if (is_wanted(gradients.query)) a.query_sum = tensor_map(gradients.query, kBoxRows);
    if (is_wanted(gradients.key)) a.key_sum = tensor_map(gradients.key, kBoxRows);
    if (is_wanted(gradients.value)) a.value_sum = tensor_map(gradients.value, kBoxRows);
  }
  a.scale = static_cast<float>(problem_.logit_scale());
  a.general = needs_general_class(problem_);
  a.natural_lse = a.general || is_float32(problem_);
  if (!block.scores.empty()) {
    a.scores = cuda::score_arguments(block.scores);
    a.query_rows = rows_of(block.query);
    a.grad_output_rows = rows_of(block.grad_output);
    if (has_narrow_kernels(problem_)) set_score_boxes(a, block.scores, gradients.bias);
  }
  if (is_wanted(gradients.bias)) {
    a.grad_bias = static_cast<float*>(gradients.bias.data());
    for (int i = 0; i < 4; ++i) a.grad_bias_strides[i] = gradients.bias.stride(i);
  }
  if (problem_.dropout) {
    a.dropout = cuda::dropout_arguments(*problem_.dropout, block.first_batch, block.first_head);
    a.dropout.called_key = block.call_arguments.dropout_key;
    a.value_scale = a.dropout.keep_scale;
  }
  if (problem_.soft_cap) {
    a.soft_cap = SmallTanh::computable(*problem_.soft_cap);
    a.tanh_scale = static_cast<float>(problem_.logit_scale() / a.soft_cap);
    const SmallTanh small(a.tanh_scale, a.soft_cap);
    std::copy_n(small.plain, 3, a.small_tanh);
    a.small_tanh_limit = small.limit;
    a.accurate_tanh = SmallTanh::needs_accuracy(a.soft_cap) ? 1 : 0;
  }
  a.grad_query = gradient_of(gradients.query);
  a.grad_key = gradient_of(gradients.key);
  a.grad_value = gradient_of(gradients.value);
  return a;
}

void FlashBackward::run(const BackwardBlock& block, const Gradients& gradients, Stream& stream) {
  if (is_empty(block)) return;
  const auto current = device_.make_current();
  const Arguments arguments = arguments_of(block, gradients);
  const int dim = tile_dim(problem_);
  auto* const raw = CudaStream::of(stream).raw();
  if (is_float16(problem_)) {
    check_cuda(
        launch_output_scale(arguments, rows_of(block.grad_output), rows_of(block.value), raw),
        "scaling the gradient of the output");
  }
  const auto launch = [&] {
    if (!is_float32(problem_)) {
      return launch_backward(arguments, dim, is_float16(problem_), raw);
    }
    const Float32Operands operands{rows_of(block.query), rows_of(block.key), rows_of(block.value),
                                   rows_of(block.grad_output)};
    return launch_float32_backward(arguments, operands, dim, raw);
  };
  check_cuda(launch(), "launching the backward pass of flash attention");
}

}  // namespace annulus::flash::backward
