#include "cuda/dropout.cuh"
#include "cuda/native_kernel.cuh"
#include "cuda/native_row.cuh"

// The plain kernel: one warp per (batch, head, row), 32 keys at a time, online softmax in float32.
// Everything the CPU's native kernel can mask, in O(S) memory; speed is not its purpose.
namespace annulus::cuda {
namespace {

constexpr int kWarps = 4;

__device__ float warp_max(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

__device__ float warp_sum(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
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
    for (int d = lane; d < a.head_dim; d += kWarp) query[d] = to_float(q[d]);
    // The state before counts as exp(LSE − high) keys of logit high and value *output, where high
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

    const NativeRow sight(a, b, head, row);
    for (int r = 0; r < a.column_ranges && !sight.padding; ++r) {
      const DeviceRange range = a.column_range[r];
      for (std::int64_t first = 0; first < range.length; first += kWarp) {
        const std::int64_t c = first + lane;
        const std::int64_t j = range.start + c * range.stride;
        float added = 0.0F;
        const bool seen = c < range.length && sight.sees(a, range.first + c, j, added);
        const unsigned seen_by = __ballot_sync(kAllLanes, seen);
        if (seen_by == 0) continue;
        float logit = -INFINITY;
        if (seen) {
          const T* const k = keys + (range.first + c) * a.key_strides[1];
          float dot = 0.0F;
          for (int d = 0; d < a.head_dim; ++d) dot = fmaf(query[d], to_float(k[d]), dot);
          logit = dot * a.scale;
          if (a.soft_cap > 0.0F) logit = a.soft_cap * tanhf(logit / a.soft_cap);
          logit += added;
        }
        // A NaN or infinite logit leaves the row without a softmax, and must show.
        if (__any_sync(kAllLanes, !(logit < INFINITY))) {
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
                       sight.position, j)
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
            const float w = __shfl_sync(kAllLanes, kept, k);
            // A value that is seen counts, however small its weight; a hidden one is not read.
            if ((seen_by >> k & 1U) != 0 && d < a.value_dim) {
              partial = fmaf(
                  w, to_float(values[(range.first + first + k) * a.value_strides[1] + d]), partial);
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
  constexpr std::int64_t kMaximumBlocks = 132 * 32;
  const std::int64_t blocks = (vectors + kWarps - 1) / kWarps;
  const auto shared =
      static_cast<std::size_t>(kWarps * (arguments.head_dim + arguments.value_dim)) * sizeof(float);
  if (shared > 48 * 1024) {
    const cudaError_t code = cudaFuncSetAttribute(
        native_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (code != cudaSuccess) return code;
  }
  native_kernel<T><<<static_cast<unsigned>(blocks < kMaximumBlocks ? blocks : kMaximumBlocks),
                     kWarps * kWarp, shared, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_native(const NativeArguments& arguments, DType dtype, cudaStream_t stream) {
  if (arguments.batch * arguments.rows * arguments.heads == 0) return cudaSuccess;
  cudaError_t code = cudaErrorInvalidValue;
  with_type(dtype, [&](auto type) { code = launch<decltype(type)>(arguments, stream); });
  return code;
}

}  // namespace annulus::cuda
