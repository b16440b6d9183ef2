#include "cuda/native_cuda.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/cuda.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>

#include "cuda/dropout_arguments.hpp"
#include "cuda/native_kernel.cuh"
#include "cuda/score_arguments.hpp"
#include "cuda/upload.hpp"

namespace annulus {
namespace {

cuda::NativeType native_type(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return cuda::NativeType::float16;
    case DType::bfloat16:
      return cuda::NativeType::bfloat16;
    default:
      return cuda::NativeType::float32;
  }
}

const std::int32_t* address(const Tensor& tensor) {
  return static_cast<const std::int32_t*>(tensor.view().data());
}

template <class View>
// NOLINTNEXTLINE(modernize-avoid-c-arrays): as device code has them
void set_strides(const View& view, std::int64_t (&strides)[3]) {
  for (int dim = 0; dim < 3; ++dim) strides[dim] = view.stride(dim);
}

using Ranges = std::vector<cuda::DeviceRange>;

// The ranges with the local index of their first entries, as many at a time as one launch takes.
std::vector<Ranges> launches_of(const PositionRanges& positions) {
  std::vector<Ranges> launches;
  std::int64_t first = 0;
  for (const PositionRange& range : positions.ranges()) {
    if (launches.empty() || launches.back().size() == cuda::NativeArguments::kMaxRanges) {
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
    check(block, result);
    if (block.query.elements() == 0) return;
    const auto current = device_.make_current();
    launch(block, result, CudaStream::of(context.stream).raw());
  }

 private:
  void check(const AttentionBlock& block, const SoftmaxState& result) const {
    const auto require = [](bool fits, const char* what) {
      if (!fits) throw InternalError(std::string("native attention on the device: ") + what);
    };
    const Extents& query = block.query.shape();
    const Extents& key = block.key.shape();
    const Extents& value = block.value.shape();
    require(query.rank() == 4 && key.rank() == 4 && value.rank() == 4, "tensors must have rank 4");
    require(key == Extents{query[0], key[1], key[2], query[3]}, "key does not fit query");
    require(value == Extents{key[0], key[1], key[2], value[3]}, "value does not fit key");
    require(key[2] > 0 && query[2] % key[2] == 0, "query heads are no multiple of key/value heads");
    require(block.rows.size() == query[1], "row positions do not fit query");
    require(block.columns.size() == key[1], "column positions do not fit key");
    require(result.output.shape() == Extents{query[0], query[1], query[2], value[3]} &&
                result.lse.shape() == Extents{query[0], query[2], query[1]},
            "result does not fit");
    block.scores.check(problem_, query, block.columns.size());
    require(result.output.dtype() == DType::float32, "output is not float32");
    require(result.lse.dtype() == DType::float32 || result.lse.dtype() == DType::float64,
            "LSE is neither float32 nor float64");
    require(!result.wants_maximum() || (result.maximum.shape() == result.lse.shape() &&
                                        result.maximum.dtype() == DType::float32),
            "maximum does not fit");
    for (const ConstTensorView& tensor : {block.query, block.key, block.value}) {
      require(tensor.dtype() == problem_.dtype, "a tensor has not the problem's dtype");
    }
    for (const ConstTensorView& tensor :
         {block.query, block.key, block.value, ConstTensorView(result.output)}) {
      require(tensor.size(3) == 1 || tensor.stride(3) == 1, "head dimension has a stride");
    }
  }

  void launch(const AttentionBlock& block, const SoftmaxState& state, cudaStream_t stream) const {
    cuda::NativeArguments a{};
    a.key = block.key.data();
    a.value = block.value.data();
    set_strides(block.query, a.query_strides);
    set_strides(block.key, a.key_strides);
    set_strides(block.value, a.value_strides);
    set_strides(state.output, a.output_strides);
    set_strides(state.lse, a.lse_strides);
    if (state.wants_maximum()) set_strides(state.maximum, a.maximum_strides);
    a.batch = block.query.size(0);
    a.heads = block.query.size(2);
    a.heads_per_kv_head = block.query.size(2) / block.key.size(2);
    a.head_dim = static_cast<int>(block.query.size(3));
    a.value_dim = static_cast<int>(block.value.size(3));
    a.scale = static_cast<float>(problem_.logit_scale());
    a.soft_cap = static_cast<float>(problem_.soft_cap.value_or(0.0));
    if (problem_.dropout) {
      a.dropout = cuda::dropout_arguments(*problem_.dropout, block.first_batch, block.first_head);
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

    std::vector<Ranges> row_launches = launches_of(block.rows);
    std::vector<Ranges> column_launches = launches_of(block.columns);
    if (column_launches.empty()) column_launches.emplace_back();  // rows that see nothing
    for (Ranges& rows : row_launches) {
      const std::int64_t first = rows.front().first;
      a.query = block.query.slice(1, first, 0).data();
      a.output = static_cast<float*>(state.output.slice(1, first, 0).data());
      a.lse = state.lse.slice(2, first, 0).data();
      a.maximum = state.wants_maximum()
                      ? static_cast<float*>(state.maximum.slice(2, first, 0).data())
                      : nullptr;
      a.scores = cuda::score_arguments(block.scores.slice(2, first, 0));
      a.wide_lse = state.lse.dtype() == DType::float64;
      a.rows = 0;
      for (cuda::DeviceRange& range : rows) {
        range.first -= first;
        a.rows += range.length;
      }
      a.row_ranges = static_cast<int>(rows.size());
      std::copy(rows.begin(), rows.end(), a.row_range);
      a.accumulate = false;
      for (const Ranges& columns : column_launches) {
        a.column_ranges = static_cast<int>(columns.size());
        std::copy(columns.begin(), columns.end(), a.column_range);
        check_cuda(cuda::launch_native(a, native_type(problem_.dtype), stream),
                   "launching native attention");
        a.accumulate = true;
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
