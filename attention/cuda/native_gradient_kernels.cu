#include "cuda/dropout.cuh"
#include "cuda/native_gradient_kernels.cuh"
#include "cuda/native_row.cuh"

// The plain backward pass: each gradient has a kernel in which one warp or block owns an entry and
// adds its terms in a fixed order, from pairs that it computes itself. Nothing is shared between
// owners, so there are no atomics and no workspace. A hidden pair is skipped: a product with its 0
// would spread what is not finite.
namespace annulus::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kBiasWarps = 16;
constexpr std::int64_t kMaximumBlocks = 132 * 32;

/// The factors by which a pair adds to the gradients.
struct Pair {
  float weight = 0;        ///< P, after dropout: of dV by dO
  float grad_logit = 0;    ///< of the final logit
  float grad_product = 0;  ///< of q·k
};

/// A row that has gradients, with its numbers of the forward pass.
struct GradientRow : NativeRow {
  std::int64_t b, head;
  float lse, delta;

  __device__ __forceinline__ GradientRow(const NativeGradientArguments& a, std::int64_t batch,
                                         std::int64_t query_head, std::int64_t row)
      : NativeRow(a, batch, query_head, row),
        b(batch),
        head(query_head),
        lse(a.lse[b * a.lse_strides[0] + head * a.lse_strides[1] + row * a.lse_strides[2]]),
        delta(a.delta[b * a.delta_strides[0] + head * a.delta_strides[1] +
                      row * a.delta_strides[2]]) {
    padding = padding || lse == -INFINITY;
  }

  /// The pair with key position j, from q·k, dO·v and the bias.
  [[nodiscard]] __device__ __forceinline__ Pair pair(const NativeGradientArguments& a,
                                                     std::int64_t j, float product, float grad,
                                                     float added) const {
    float logit = product * a.scale;
    float slope = a.scale;
    if (a.soft_cap > 0.0F) {
      // 1/cosh² is precise also where 1 − tanh² is small.
      const float inverse = 1.0F / coshf(logit / a.soft_cap);
      slope *= inverse * inverse;
      logit = a.soft_cap * tanhf(logit / a.soft_cap);
    }
    const float probability = expf(logit + added - lse);
    float keep = 1.0F;
    if (a.dropout.threshold > 0) {
      keep = drops(a.dropout, static_cast<std::uint32_t>(b), static_cast<std::uint32_t>(head),
                   position, j)
                 ? 0.0F
                 : a.dropout.keep_scale;
    }
    const float grad_logit = probability * (keep * grad - delta);
    return {probability * keep, grad_logit, slope * grad_logit};
  }
};

template <class Left, class Right>
__device__ __forceinline__ float dot(const Left* left, const Right* right, int dims) {
  float sum = 0.0F;
  for (int d = 0; d < dims; ++d) sum = fmaf(to_float(left[d]), to_float(right[d]), sum);
  return sum;
}

/// sums += Σ weights[lane] · vectors[lane · stride] over the lanes of `seen_by`.
template <class T>
__device__ __forceinline__ void add_products(float* sums, int dims, float weight, unsigned seen_by,
                                             const T* vectors, std::int64_t stride) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int d0 = 0; d0 < dims; d0 += kWarp) {
    const int d = d0 + lane;
    float partial = 0.0F;
    for (int k = 0; k < kWarp; ++k) {
      const float w = __shfl_sync(kAllLanes, weight, k);
      if ((seen_by >> k & 1U) != 0 && d < dims) {
        partial = fmaf(w, to_float(vectors[k * stride + d]), partial);
      }
    }
    if (d < dims) sums[d] += partial;
  }
}

template <class T>
__device__ __forceinline__ const T* vector_of(const void* tensor, const std::int64_t* strides,
                                              std::int64_t b, std::int64_t index,
                                              std::int64_t head) {
  return static_cast<const T*>(tensor) + b * strides[0] + index * strides[1] + head * strides[2];
}

__device__ __forceinline__ float* vector_of(const NativeGradient& gradient, std::int64_t b,
                                            std::int64_t index, std::int64_t head) {
  return gradient.data + b * gradient.strides[0] + index * gradient.strides[1] +
         head * gradient.strides[2];
}

/// dQ: a warp owns a row of a query head, and takes 32 columns at a time.
template <class T>
__global__ void query_kernel(const __grid_constant__ NativeGradientArguments a) {
  extern __shared__ float shared[];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps_of_block = static_cast<int>(blockDim.x) / kWarp;
  float* const query = shared + warp * (2 * a.head_dim + a.value_dim);
  float* const grad_output = query + a.head_dim;
  float* const sum = grad_output + a.value_dim;

  const std::int64_t vectors = a.batch * a.rows * a.heads;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * warps_of_block;
  for (std::int64_t v = static_cast<std::int64_t>(blockIdx.x) * warps_of_block + warp; v < vectors;
       v += warps) {
    const std::int64_t head = v % a.heads;
    const std::int64_t row = v / a.heads % a.rows;
    const std::int64_t b = v / a.heads / a.rows;
    const std::int64_t kv_head = head / a.heads_per_kv_head;
    const GradientRow sight(a, b, head, row);
    if (sight.padding) continue;

    const T* const q = vector_of<T>(a.query, a.query_strides, b, row, head);
    const T* const g = vector_of<T>(a.grad_output, a.grad_output_strides, b, row, head);
    __syncwarp();
    for (int d = lane; d < a.head_dim; d += kWarp) {
      query[d] = to_float(q[d]);
      sum[d] = 0.0F;
    }
    for (int d = lane; d < a.value_dim; d += kWarp) grad_output[d] = to_float(g[d]);
    __syncwarp();
    for (std::int64_t first = 0; first < a.columns; first += kWarp) {
      const std::int64_t c0 = a.column_range[0].first + first;
      const std::int64_t c = c0 + lane;
      const std::int64_t j = position_of(a.column_range, a.column_ranges, c);
      float added = 0.0F;
      const bool seen = first + lane < a.columns && sight.sees(a, c, j, added);
      const unsigned seen_by = __ballot_sync(kAllLanes, seen);
      if (seen_by == 0) continue;
      Pair pair;
      if (seen) {
        const T* const k = vector_of<T>(a.key, a.key_strides, b, c, kv_head);
        const T* const v_of_key = vector_of<T>(a.value, a.value_strides, b, c, kv_head);
        pair = sight.pair(a, j, dot(query, k, a.head_dim), dot(grad_output, v_of_key, a.value_dim),
                          added);
      }
      add_products(sum, a.head_dim, pair.grad_product, seen_by,
                   vector_of<T>(a.key, a.key_strides, b, c0, kv_head), a.key_strides[1]);
    }
    float* const gradient = vector_of(a.grad_query, b, row, head);
    for (int d = lane; d < a.head_dim; d += kWarp) gradient[d] += sum[d];
  }
}

/// dK and dV: a warp owns a column of a key/value head, and takes 32 rows of a query head at a
/// time, head by head.
template <class T>
__global__ void key_kernel(const __grid_constant__ NativeGradientArguments a) {
  extern __shared__ float shared[];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps_of_block = static_cast<int>(blockDim.x) / kWarp;
  float* const key = shared + warp * 2 * (a.head_dim + a.value_dim);
  float* const value = key + a.head_dim;
  float* const key_sum = value + a.value_dim;
  float* const value_sum = key_sum + a.head_dim;
  const bool wants_key = a.grad_key.data != nullptr;
  const bool wants_value = a.grad_value.data != nullptr;

  const std::int64_t kv_heads = a.heads / a.heads_per_kv_head;
  const std::int64_t vectors = a.batch * a.columns * kv_heads;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * warps_of_block;
  for (std::int64_t v = static_cast<std::int64_t>(blockIdx.x) * warps_of_block + warp; v < vectors;
       v += warps) {
    const std::int64_t kv_head = v % kv_heads;
    const std::int64_t c = a.column_range[0].first + v / kv_heads % a.columns;
    const std::int64_t b = v / kv_heads / a.columns;
    const std::int64_t j = position_of(a.column_range, a.column_ranges, c);

    const T* const k = vector_of<T>(a.key, a.key_strides, b, c, kv_head);
    const T* const v_of_key = vector_of<T>(a.value, a.value_strides, b, c, kv_head);
    __syncwarp();
    for (int d = lane; d < a.head_dim; d += kWarp) {
      key[d] = to_float(k[d]);
      key_sum[d] = 0.0F;
    }
    for (int d = lane; d < a.value_dim; d += kWarp) {
      value[d] = to_float(v_of_key[d]);
      value_sum[d] = 0.0F;
    }
    __syncwarp();
    for (std::int64_t h = 0; h < a.heads_per_kv_head; ++h) {
      const std::int64_t head = kv_head * a.heads_per_kv_head + h;
      for (std::int64_t first = 0; first < a.rows; first += kWarp) {
        // Lanes past the end take the last row, and do not see it.
        const std::int64_t row = first + lane < a.rows ? first + lane : a.rows - 1;
        const GradientRow sight(a, b, head, row);
        float added = 0.0F;
        const bool seen = first + lane < a.rows && sight.sees(a, c, j, added);
        const unsigned seen_by = __ballot_sync(kAllLanes, seen);
        if (seen_by == 0) continue;
        Pair pair;
        if (seen) {
          const T* const q = vector_of<T>(a.query, a.query_strides, b, row, head);
          const T* const g = vector_of<T>(a.grad_output, a.grad_output_strides, b, row, head);
          pair = sight.pair(a, j, dot(key, q, a.head_dim),
                            wants_key ? dot(value, g, a.value_dim) : 0.0F, added);
        }
        if (wants_key) {
          add_products(key_sum, a.head_dim, pair.grad_product, seen_by,
                       vector_of<T>(a.query, a.query_strides, b, first, head), a.query_strides[1]);
        }
        if (wants_value) {
          add_products(value_sum, a.value_dim, pair.weight, seen_by,
                       vector_of<T>(a.grad_output, a.grad_output_strides, b, first, head),
                       a.grad_output_strides[1]);
        }
      }
    }
    if (wants_key) {
      float* const gradient = vector_of(a.grad_key, b, c, kv_head);
      for (int d = lane; d < a.head_dim; d += kWarp) gradient[d] += key_sum[d];
    }
    if (wants_value) {
      float* const gradient = vector_of(a.grad_value, b, c, kv_head);
      for (int d = lane; d < a.value_dim; d += kWarp) gradient[d] += value_sum[d];
    }
  }
}

/// How the pairs of a launch fall on the entries of the bias' gradient. A dimension counts as
/// `owned` where entries differ, as `summed` where it is broadcast.
struct BiasEntries {
  std::int64_t owned[3], summed[3];  // of batch, head, row
  bool owned_keys;
  std::int64_t chunks;  // of 32 columns

  __host__ __device__ explicit BiasEntries(const NativeGradientArguments& a)
      : owned_keys(a.grad_bias_strides[3] != 0), chunks((a.columns + kWarp - 1) / kWarp) {
    const std::int64_t sizes[3] = {a.batch, a.heads, a.rows};
    for (int dim = 0; dim < 3; ++dim) {
      owned[dim] = a.grad_bias_strides[dim] != 0 ? sizes[dim] : 1;
      summed[dim] = a.grad_bias_strides[dim] != 0 ? 1 : sizes[dim];
    }
  }
  [[nodiscard]] __host__ __device__ std::int64_t owners() const {
    return owned[0] * owned[1] * owned[2] * (owned_keys ? chunks : 1);
  }
  /// An owner adds up so many pairs of a row with a chunk.
  [[nodiscard]] __host__ __device__ std::int64_t terms() const {
    return summed[0] * summed[1] * summed[2] * (owned_keys ? 1 : chunks);
  }
};

/// dbias: a block owns the entries of 32 keys, or one entry if the bias is the same for all keys.
/// Its warps take turns at the terms; float64 sums lose nothing, however many there are.
template <class T>
__global__ void bias_kernel(const __grid_constant__ NativeGradientArguments a) {
  __shared__ double sums[kBiasWarps][kWarp];
  const BiasEntries entries(a);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  for (std::int64_t o = blockIdx.x; o < entries.owners(); o += gridDim.x) {
    const std::int64_t owned_chunks = entries.owned_keys ? entries.chunks : 1;
    const std::int64_t own_chunk = o % owned_chunks;
    const std::int64_t own_row = o / owned_chunks % entries.owned[2];
    const std::int64_t own_head = o / owned_chunks / entries.owned[2] % entries.owned[1];
    const std::int64_t own_batch = o / owned_chunks / entries.owned[2] / entries.owned[1];
    double sum = 0;
    for (std::int64_t term = warp; term < entries.terms(); term += warps) {
      const std::int64_t chunks = entries.owned_keys ? 1 : entries.chunks;
      const std::int64_t row = own_row + term / chunks % entries.summed[2];
      const std::int64_t head = own_head + term / chunks / entries.summed[2] % entries.summed[1];
      const std::int64_t b = own_batch + term / chunks / entries.summed[2] / entries.summed[1];
      const std::int64_t n = (own_chunk + term % chunks) * kWarp + lane;
      if (n >= a.columns) continue;
      const GradientRow sight(a, b, head, row);
      const std::int64_t c = a.column_range[0].first + n;
      const std::int64_t j = position_of(a.column_range, a.column_ranges, c);
      float added = 0.0F;
      if (!sight.sees(a, c, j, added)) continue;
      const std::int64_t kv_head = head / a.heads_per_kv_head;
      const Pair pair =
          sight.pair(a, j,
                     dot(vector_of<T>(a.query, a.query_strides, b, row, head),
                         vector_of<T>(a.key, a.key_strides, b, c, kv_head), a.head_dim),
                     dot(vector_of<T>(a.grad_output, a.grad_output_strides, b, row, head),
                         vector_of<T>(a.value, a.value_strides, b, c, kv_head), a.value_dim),
                     added);
      sum += pair.grad_logit;
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0) {
      for (int w = 1; w < warps; ++w) sum += sums[w][lane];
      sums[0][lane] = sum;
      __syncwarp();
      float* const gradient = a.grad_bias + own_batch * a.grad_bias_strides[0] +
                              own_head * a.grad_bias_strides[1] + own_row * a.grad_bias_strides[2];
      const std::int64_t n = own_chunk * kWarp + lane;
      if (entries.owned_keys && n < a.columns) {
        const std::int64_t c = a.column_range[0].first + n;
        const std::int64_t j = position_of(a.column_range, a.column_ranges, c);
        gradient[a.scores.key_of(c, j) * a.grad_bias_strides[3]] += static_cast<float>(sum);
      } else if (!entries.owned_keys && lane == 0) {
        for (int l = 1; l < kWarp; ++l) sum += sums[0][l];
        *gradient += static_cast<float>(sum);
      }
    }
    __syncthreads();
  }
}

using Kernel = void (*)(NativeGradientArguments);

/// One warp for each vector, with so many floats of shared memory.
cudaError_t launch_warps(Kernel kernel, const NativeGradientArguments& a, std::int64_t vectors,
                         int floats, cudaStream_t stream) {
  // Every device has so much without asking. Head dimensions add up to 4096 at the most.
  constexpr std::size_t kMaximumShared = 48 * 1024;
  const std::size_t bytes = static_cast<std::size_t>(floats) * sizeof(float);
  const int warps = kWarps * bytes <= kMaximumShared ? kWarps : 1;
  const std::int64_t blocks = (vectors + warps - 1) / warps;
  kernel<<<static_cast<unsigned>(blocks < kMaximumBlocks ? blocks : kMaximumBlocks),
           static_cast<unsigned>(warps * kWarp), static_cast<std::size_t>(warps) * bytes, stream>>>(
      a);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch(const NativeGradientArguments& a, cudaStream_t stream) {
  cudaError_t code = cudaSuccess;
  if (a.grad_query.data != nullptr) {
    code = launch_warps(query_kernel<T>, a, a.batch * a.rows * a.heads,
                        2 * a.head_dim + a.value_dim, stream);
  }
  if (code == cudaSuccess && (a.grad_key.data != nullptr || a.grad_value.data != nullptr)) {
    code = launch_warps(key_kernel<T>, a, a.batch * a.columns * (a.heads / a.heads_per_kv_head),
                        2 * (a.head_dim + a.value_dim), stream);
  }
  if (code == cudaSuccess && a.grad_bias != nullptr) {
    const BiasEntries entries(a);
    const std::int64_t owners = entries.owners();
    const std::int64_t warps = entries.terms() < kBiasWarps ? entries.terms() : kBiasWarps;
    bias_kernel<T><<<static_cast<unsigned>(owners < kMaximumBlocks ? owners : kMaximumBlocks),
                     static_cast<unsigned>(warps * kWarp), 0, stream>>>(a);
    code = cudaGetLastError();
  }
  return code;
}

}  // namespace

cudaError_t launch_native_gradients(const NativeGradientArguments& arguments, DType dtype,
                                    cudaStream_t stream) {
  if (arguments.batch * arguments.rows * arguments.heads * arguments.columns == 0) {
    return cudaSuccess;
  }
  cudaError_t code = cudaErrorInvalidValue;
  with_type(dtype, [&](auto type) { code = launch<decltype(type)>(arguments, stream); });
  return code;
}

}  // namespace annulus::cuda
