#include <cfloat>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/dropout.cuh"
#include "cuda/native_kernel.cuh"

// The plain kernel: one warp per (batch, head, row), 32 keys at a time, online softmax in float32.
// Everything the CPU's native kernel can mask, in O(S) memory; speed is not its purpose.
namespace annulus::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;
constexpr unsigned kAll = 0xffffffffU;

__device__ float widen(float value) {
  return value;
}
__device__ float widen(__half value) {
  return __half2float(value);
}
__device__ float widen(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

__device__ float warp_max(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAll, value, step));
  }
  return value;
}

__device__ float warp_sum(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
  return value;
}

__device__ std::int64_t row_position(const NativeArguments& a, std::int64_t row) {
  int r = 0;
  while (r + 1 < a.row_ranges && row >= a.row_range[r + 1].first) ++r;
  return a.row_range[r].start + (row - a.row_range[r].first) * a.row_range[r].stride;
}

// The keys that the row of global position i sees by its position.
__device__ KeySpans keys_of(const NativeArguments& a, std::int64_t batch, std::int64_t i,
                            std::int32_t segment) {
  PositionFrame frame = a.frame;
  if (a.offsets != nullptr) frame.offset = a.offsets[batch];
  if (a.prefixes != nullptr) frame.prefix = a.prefixes[batch];
  if (a.query_cu_seqlens != nullptr) {
    frame = frame_of_document(a.query_cu_seqlens, a.kv_cu_seqlens, segment, a.bottom_right,
                              frame.prefix);
  }
  return a.positions.rule(frame).keys_of(i);
}

// True if a row of this segment that sees these keys, with these blocks, sees key position j.
__device__ bool visible(const NativeArguments& a, std::int64_t batch, const KeySpans& keys,
                        std::int32_t segment, const std::int32_t* blocks, std::int64_t j) {
  if (j >= keys.opening && (j < keys.begin || j >= keys.end)) return false;
  if (a.kv_lengths != nullptr && j >= a.kv_lengths[batch]) return false;
  if (blocks != nullptr && blocks[j / a.kv_block * a.block_strides[3]] == 0) return false;
  return a.kv_segments == nullptr || a.kv_segments[batch * a.kv_length + j] == segment;
}

template <class T>
__global__ void native_kernel(const __grid_constant__ NativeArguments a) {
  extern __shared__ float shared[];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  float* const query = shared + warp * (a.head_dim + a.value_dim);
  float* const sum = query + a.head_dim;

  const std::int64_t vectors = a.batch * a.rows * a.heads;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * kWarps;
  for (std::int64_t v = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp; v < vectors;
       v += warps) {
    const std::int64_t head = v % a.heads;
    const std::int64_t row = v / a.heads % a.rows;
    const std::int64_t b = v / a.heads / a.rows;
    const std::int64_t kv_head = head / a.heads_per_kv_head;
    const std::int64_t batch = a.first_batch + b;
    const std::int64_t i = row_position(a, row);
    float* const output =
        a.output + b * a.output_strides[0] + row * a.output_strides[1] + head * a.output_strides[2];
    const std::int64_t lse_index =
        b * a.lse_strides[0] + head * a.lse_strides[1] + row * a.lse_strides[2];
    float* const maximum = a.maximum == nullptr
                               ? nullptr
                               : a.maximum + b * a.maximum_strides[0] +
                                     head * a.maximum_strides[1] + row * a.maximum_strides[2];
    const T* const q = static_cast<const T*>(a.query) + b * a.query_strides[0] +
                       row * a.query_strides[1] + head * a.query_strides[2];
    const T* const keys =
        static_cast<const T*>(a.key) + b * a.key_strides[0] + kv_head * a.key_strides[2];
    const T* const values =
        static_cast<const T*>(a.value) + b * a.value_strides[0] + kv_head * a.value_strides[2];

    __syncwarp();
    for (int d = lane; d < a.head_dim; d += kWarp) query[d] = widen(q[d]);
    // What came before counts as exp(LSE − high) keys of logit high and value *output, where high
    // is the maximum if that is wanted, else the LSE in float32.
    float high = -INFINITY;
    float total = 0.0F;
    // It saw keys, but so far only logits of −∞: see SoftmaxState.
    bool weightless = false;
    if (a.accumulate) {
      const double lse = a.wide_lse
                             ? static_cast<const double*>(a.lse)[lse_index]
                             : static_cast<double>(static_cast<const float*>(a.lse)[lse_index]);
      high = maximum == nullptr ? static_cast<float>(lse) : *maximum;
      total = high == -INFINITY ? 0.0F : static_cast<float>(exp(lse - high));
      weightless = high == -INFINITY && isnan(output[0]);
    }
    for (int d = lane; d < a.value_dim; d += kWarp) {
      sum[d] = high == -INFINITY ? 0.0F : output[d] * total;
    }
    __syncwarp();

    std::int32_t segment = -1;
    bool padding = a.query_lengths != nullptr && i >= a.query_lengths[batch];
    if (a.query_segments != nullptr) {
      segment = a.query_segments[batch * a.query_length + i];
      padding = padding || segment < 0;
    }
    const KeySpans visible_keys = padding ? KeySpans{} : keys_of(a, batch, i, segment);
    const std::int32_t* const blocks = a.blocks == nullptr
                                           ? nullptr
                                           : a.blocks + batch * a.block_strides[0] +
                                                 (a.first_head + head) * a.block_strides[1] +
                                                 i / a.query_block * a.block_strides[2];
    const float* const bias =
        a.scores.bias.data == nullptr ? nullptr : a.scores.bias.row(b, head, row);
    const std::uint8_t* const mask =
        a.scores.mask.data == nullptr ? nullptr : a.scores.mask.row(b, head, row);
    for (int r = 0; r < a.column_ranges && !padding; ++r) {
      const DeviceRange range = a.column_range[r];
      for (std::int64_t first = 0; first < range.length; first += kWarp) {
        const std::int64_t c = first + lane;
        const std::int64_t j = range.start + c * range.stride;
        const std::int64_t key = a.scores.key_of(range.first + c, j);
        bool seen = c < range.length && visible(a, batch, visible_keys, segment, blocks, j);
        if (seen && mask != nullptr) seen = mask[key * a.scores.mask.strides[3]] != 0;
        float added = 0.0F;
        if (seen && bias != nullptr) {
          added = bias[key * a.scores.bias.strides[3]];
          seen = added != -INFINITY;
        }
        const unsigned seen_by = __ballot_sync(kAll, seen);
        if (seen_by == 0) continue;
        float logit = -INFINITY;
        if (seen) {
          const T* const k = keys + (range.first + c) * a.key_strides[1];
          float dot = 0.0F;
          for (int d = 0; d < a.head_dim; ++d) dot = fmaf(query[d], widen(k[d]), dot);
          logit = dot * a.scale;
          if (a.soft_cap > 0.0F) logit = a.soft_cap * tanhf(logit / a.soft_cap);
          logit += added;
        }
        // A NaN or infinite logit leaves the row without a softmax, and must show.
        if (__any_sync(kAll, !(logit < INFINITY))) {
          total = NAN;
          if (high == -INFINITY) high = 0.0F;
          continue;
        }
        const float next = fmaxf(high, warp_max(logit));
        if (next == -INFINITY) {
          weightless = true;
          continue;
        }
        const float keep = expf(high - next);
        const float weight = expf(logit - next);
        total = total * keep + warp_sum(weight);
        float kept = weight;
        if (a.dropout.threshold > 0) {
          kept = drops(a.dropout, static_cast<std::uint32_t>(b), static_cast<std::uint32_t>(head),
                       i, j)
                     ? 0.0F
                     : weight * a.dropout.keep_scale;
        }
        high = next;
        const std::int64_t left = range.length - first;
        const int count = left < kWarp ? static_cast<int>(left) : kWarp;
        for (int d0 = 0; d0 < a.value_dim; d0 += kWarp) {
          const int d = d0 + lane;
          float partial = 0.0F;
          for (int k = 0; k < count; ++k) {
            const float w = __shfl_sync(kAll, kept, k);
            // A value that is seen counts, however small its weight; a hidden one is not read.
            if ((seen_by >> k & 1U) != 0 && d < a.value_dim) {
              partial = fmaf(w, widen(values[(range.first + first + k) * a.value_strides[1] + d]),
                             partial);
            }
          }
          if (d < a.value_dim) sum[d] = sum[d] * keep + partial;
        }
        __syncwarp();
      }
    }
    const bool empty = high == -INFINITY;
    for (int d = lane; d < a.value_dim; d += kWarp) {
      output[d] = !empty ? sum[d] / total : (weightless ? NAN : 0.0F);
    }
    if (lane == 0 && maximum != nullptr) *maximum = isnan(total) ? NAN : high;
    if (lane == 0 && a.wide_lse) {
      static_cast<double*>(a.lse)[lse_index] =
          empty ? -INFINITY : static_cast<double>(high) + log(static_cast<double>(total));
    } else if (lane == 0) {
      static_cast<float*>(a.lse)[lse_index] = empty ? -INFINITY : high + logf(total);
    }
    __syncwarp();
  }
}

template <class T>
cudaError_t launch(const NativeArguments& arguments, cudaStream_t stream) {
  const std::int64_t vectors = arguments.batch * arguments.rows * arguments.heads;
  constexpr std::int64_t kMostBlocks = 132 * 32;
  const std::int64_t blocks = (vectors + kWarps - 1) / kWarps;
  const auto shared =
      static_cast<std::size_t>(kWarps * (arguments.head_dim + arguments.value_dim)) * sizeof(float);
  if (shared > 48 * 1024) {
    const cudaError_t code = cudaFuncSetAttribute(
        native_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (code != cudaSuccess) return code;
  }
  native_kernel<T><<<static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks),
                     kWarps * kWarp, shared, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_native(const NativeArguments& arguments, NativeType type, cudaStream_t stream) {
  if (arguments.batch * arguments.rows * arguments.heads == 0) return cudaSuccess;
  switch (type) {
    case NativeType::float16:
      return launch<__half>(arguments, stream);
    case NativeType::bfloat16:
      return launch<__nv_bfloat16>(arguments, stream);
    case NativeType::float32:
      return launch<float>(arguments, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace annulus::cuda
