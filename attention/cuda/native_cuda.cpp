#include "cuda/native_cuda.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/cuda.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>

#include "cuda/dropout_arguments.hpp"
#include "cuda/native_gradient_kernels.cuh"
#include "cuda/native_kernel.cuh"
#include "cuda/score_arguments.hpp"
#include "cuda/upload.hpp"
#include "native/block_checks.hpp"

namespace annulus {
namespace {

const std::int32_t* address(const Tensor& tensor) {
  return static_cast<const std::int32_t*>(tensor.view().data());
}

template <class View>
// NOLINTNEXTLINE(modernize-avoid-c-arrays): as device code has them
void set_strides(const View& view, std::int64_t (&strides)[3]) {
  for (int dim = 0; dim < 3; ++dim) strides[dim] = view.stride(dim);
}

using Ranges = std::vector<cuda::DeviceRange>;

std::int64_t entries_of(const Ranges& ranges) {
  std::int64_t entries = 0;
  for (const cuda::DeviceRange& range : ranges) entries += range.length;
  return entries;
}

cuda::NativeGradient gradient_of(const TensorView& tensor) {
  cuda::NativeGradient gradient{};
  if (tensor.rank() == 0) return gradient;
  gradient.data = static_cast<float*>(tensor.data());
  set_strides(tensor, gradient.strides);
  return gradient;
}

// The ranges with the local index of their first entries, as many at a time as one launch takes.
std::vector<Ranges> launches_of(const PositionRanges& positions) {
  std::vector<Ranges> launches;
  std::int64_t first = 0;
  for (const PositionRange& range : positions.ranges()) {
    if (launches.empty() || launches.back().size() == cuda::NativeBlock::kMaxRanges) {
      launches.emplace_back();
    }
    launches.back().push_back({range.start.value(), range.length, range.stride, first});
    first += range.length;
  }
  return launches;
}

class NativeCudaKernel final : public Kernel {
 public:
  NativeCudaKernel(const AttentionProblem& problem, Device& device)
      : problem_(problem), device_(device) {
    const auto current = device_.make_current();
    const Mask& mask = problem.mask;
    MemoryPool& memory = device.memory();
    query_lengths_ = upload(mask.query_lengths(), memory);
    kv_lengths_ = upload(mask.kv_lengths(), memory);
    offsets_ = upload(mask.offsets(), memory);
    prefixes_ = upload(mask.prefixes(), memory);
    query_cu_seqlens_ = upload(mask.query_cu_seqlens(), memory);
    kv_cu_seqlens_ = upload(mask.kv_cu_seqlens(), memory);
    if (mask.has_segments()) {
      std::vector<std::int32_t> query;
      std::vector<std::int32_t> kv;
      for (std::int64_t batch = 0; batch < problem.shape.batch; ++batch) {
        const auto query_ids = mask.query_segments(batch);
        const auto kv_ids = mask.kv_segments(batch);
        query.insert(query.end(), query_ids.begin(), query_ids.end());
        kv.insert(kv.end(), kv_ids.begin(), kv_ids.end());
      }
      query_segments_ = upload(query, memory);
      kv_segments_ = upload(kv, memory);
    }
    if (mask.block_mask()) blocks_ = upload(mask.block_mask()->entries(), memory);
  }

  void forward(const AttentionBlock& block, const SoftmaxState& result,
               const ExecutionContext& context) override {
    check_forward(problem_, block, result);
    if (block.query.elements() == 0) return;
    const auto current = device_.make_current();
    launch(block, result, CudaStream::of(context.stream).raw());
  }

  void backward(const BackwardBlock& block, const Gradients& gradients,
                const ExecutionContext& context) override {
    check_gradients(problem_, block, gradients);
    if (block.query.elements() == 0 || block.key.elements() == 0) return;
    const auto current = device_.make_current();
    launch(block, gradients, CudaStream::of(context.stream).raw());
  }

 private:
  // All but the rows and columns, and what begins at a row.
  void describe(const AttentionBlock& block, cuda::NativeBlock& a) const {
    a.key = block.key.data();
    a.value = block.value.data();
    set_strides(block.query, a.query_strides);
    set_strides(block.key, a.key_strides);
    set_strides(block.value, a.value_strides);
    a.batch = block.query.size(0);
    a.heads = block.query.size(2);
    a.heads_per_kv_head = block.query.size(2) / block.key.size(2);
    a.head_dim = static_cast<int>(block.query.size(3));
    a.value_dim = static_cast<int>(block.value.size(3));
    a.scale = static_cast<float>(problem_.logit_scale());
    a.soft_cap = static_cast<float>(problem_.soft_cap.value_or(0.0));
    if (problem_.dropout) {
      a.dropout = cuda::dropout_arguments(*problem_.dropout, block.first_batch, block.first_head);
      a.dropout.called_key = block.call_arguments.dropout_key;
    }
    if (!block.unmasked) {
      const Mask& mask = problem_.mask;
      a.positions = mask.position_parts();
      a.frame = {0, 0, mask.offset(), mask.prefix()};
      a.offsets = address(offsets_);
      a.prefixes = address(prefixes_);
      a.query_cu_seqlens = address(query_cu_seqlens_);
      a.kv_cu_seqlens = address(kv_cu_seqlens_);
      a.bottom_right = mask.alignment() == DocumentAlignment::bottom_right;
      a.query_lengths = address(query_lengths_);
      a.kv_lengths = address(kv_lengths_);
      a.query_segments = address(query_segments_);
      a.kv_segments = address(kv_segments_);
      const CallArgumentArrays& called = block.call_arguments;
      if (called.query_lengths != nullptr) a.query_lengths = called.query_lengths;
      if (called.kv_lengths != nullptr) a.kv_lengths = called.kv_lengths;
      if (called.offsets != nullptr) a.offsets = called.offsets;
    }
    a.query_length = problem_.shape.query_length;
    a.kv_length = problem_.shape.kv_length;
    a.first_batch = block.first_batch;
    a.first_head = block.first_head;
    if (const auto& blocks = problem_.mask.block_mask(); blocks && !block.unmasked) {
      a.blocks = address(blocks_);
      const Extents strides = contiguous_strides(blocks->shape());
      for (int dim = 0; dim < 4; ++dim) {
        a.block_strides[dim] = blocks->shape()[dim] == 1 ? 0 : strides[dim];
      }
      a.query_block = blocks->size().query;
      a.kv_block = blocks->size().kv;
    }
  }

  // Makes `ranges` the rows of a launch, and returns the first of them.
  static std::int64_t set_rows(const AttentionBlock& block, Ranges ranges, cuda::NativeBlock& a) {
    const std::int64_t first = ranges.front().first;
    for (cuda::DeviceRange& range : ranges) range.first -= first;
    a.query = block.query.slice(1, first, 0).data();
    a.scores = cuda::score_arguments(block.scores.slice(2, first, 0));
    a.rows = entries_of(ranges);
    a.row_ranges = static_cast<int>(ranges.size());
    std::copy(ranges.begin(), ranges.end(), a.row_range);
    return first;
  }
  static void set_columns(const Ranges& ranges, cuda::NativeBlock& a) {
    a.column_ranges = static_cast<int>(ranges.size());
    std::copy(ranges.begin(), ranges.end(), a.column_range);
  }

  void launch(const AttentionBlock& block, const SoftmaxState& state, cudaStream_t stream) const {
    cuda::NativeArguments a{};
    describe(block, a);
    set_strides(state.output, a.output_strides);
    set_strides(state.lse, a.lse_strides);
    if (state.wants_maximum()) set_strides(state.maximum, a.maximum_strides);
    a.wide_lse = state.lse.dtype() == DType::float64;
    std::vector<Ranges> column_launches = launches_of(block.columns);
    if (column_launches.empty()) column_launches.emplace_back();  // rows that see nothing
    for (const Ranges& rows : launches_of(block.rows)) {
      const std::int64_t first = set_rows(block, rows, a);
      a.output = static_cast<float*>(state.output.slice(1, first, 0).data());
      a.lse = state.lse.slice(2, first, 0).data();
      a.maximum = state.wants_maximum()
                      ? static_cast<float*>(state.maximum.slice(2, first, 0).data())
                      : nullptr;
      a.accumulate = false;
      for (const Ranges& columns : column_launches) {
        set_columns(columns, a);
        check_cuda(cuda::launch_native(a, problem_.dtype, stream), "launching native attention");
        a.accumulate = true;
      }
    }
  }

  void launch(const BackwardBlock& block, const Gradients& gradients, cudaStream_t stream) const {
    const AttentionBlock forward = forward_of(block);
    cuda::NativeGradientArguments a{};
    describe(forward, a);
    set_strides(block.grad_output, a.grad_output_strides);
    set_strides(block.lse, a.lse_strides);
    set_strides(block.delta, a.delta_strides);
    a.grad_key = gradient_of(gradients.key);
    a.grad_value = gradient_of(gradients.value);
    const bool wants_query = gradients.query.rank() > 0;
    const bool wants_bias = gradients.bias.rank() > 0;
    const std::vector<Ranges> column_launches = launches_of(block.columns);
    for (const Ranges& rows : launches_of(block.rows)) {
      const std::int64_t first = set_rows(forward, rows, a);
      a.grad_output = block.grad_output.slice(1, first, 0).data();
      a.lse = static_cast<const float*>(block.lse.slice(2, first, 0).data());
      a.delta = static_cast<const float*>(block.delta.slice(2, first, 0).data());
      if (wants_query) a.grad_query = gradient_of(gradients.query.slice(1, first, 0));
      if (wants_bias) {
        a.grad_bias = static_cast<float*>(gradients.bias.slice(2, first, 0).data());
        for (int dim = 0; dim < 4; ++dim) a.grad_bias_strides[dim] = gradients.bias.stride(dim);
      }
      for (const Ranges& columns : column_launches) {
        set_columns(columns, a);
        a.columns = entries_of(columns);
        check_cuda(cuda::launch_native_gradients(a, problem_.dtype, stream),
                   "launching the backward pass of native attention");
      }
    }
  }

  const AttentionProblem& problem_;
  Device& device_;
  Tensor query_lengths_;
  Tensor kv_lengths_;
  Tensor offsets_;
  Tensor prefixes_;
  Tensor query_cu_seqlens_;
  Tensor kv_cu_seqlens_;
  Tensor query_segments_;
  Tensor kv_segments_;
  Tensor blocks_;
};

}  // namespace

Capability native_cuda_available(Place place) {
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    return Capability::no(reason + ", so nothing runs on " + to_string(place));
  }
  return Capability::yes();
}

std::unique_ptr<Kernel> make_native_cuda_kernel(const AttentionProblem& problem, Device& device) {
  return std::make_unique<NativeCudaKernel>(problem, device);
}

}  // namespace annulus
