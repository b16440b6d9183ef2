#include <type_traits>

#include "flash/decode/kernels.hpp"
#include "flash/hopper/early_launch.cuh"
#include "flash/result.cuh"
#include "flash/softmax.cuh"

namespace annulus::flash::decode {
namespace {

constexpr unsigned kAll = 0xffffffff;
constexpr double kLog2E64 = 1.4426950408889634074;
constexpr double kLn2of64 = 0.69314718055994530942;

__device__ void add(float4& to, float weight, const float4& x) {
  to.x = fmaf(weight, x.x, to.x);
  to.y = fmaf(weight, x.y, to.y);
  to.z = fmaf(weight, x.z, to.z);
  to.w = fmaf(weight, x.w, to.w);
}

__device__ float4 times(float factor, const float4& x) {
  return make_float4(factor * x.x, factor * x.y, factor * x.z, factor * x.w);
}

__device__ float2 unpack(const __nv_bfloat162& x) {
  return __bfloat1622float2(x);
}
__device__ float2 unpack(const __half2& x) {
  return __half22float2(x);
}
template <class Element>
__device__ float4 load_four(const Element* from) {
  using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  const float2 low = unpack(reinterpret_cast<const Pair&>(bits.x));
  const float2 high = unpack(reinterpret_cast<const Pair&>(bits.y));
  return make_float4(low.x, low.y, high.x, high.y);
}

/// The columns that a row sees beside the columns that all rows of its batch see. A lane has the
/// dimensions from 4 · lane + 128 · i on.
template <class Element>
class OwnColumns {
  static constexpr int kVectors = 2;  // up to 256 dimensions
  static constexpr int kAtOnce = 4;   // columns, so that their loads overlap

 public:
  float maximum = -kLargest / 2;  ///< of the logits, in units of log 2; finite: see Decoder::begin
  float sum = 0;                  ///< of the weights relative to it
  float4 output[kVectors] = {};   ///< of the weighted values
  bool sees = true;               ///< the row sees any column, here or elsewhere
  bool shares = true;             ///< it sees the columns that all rows of the batch see

  __device__ OwnColumns(const DecodeArguments& arguments, const ResultRow& at, std::int32_t kv_head)
      : a(arguments), lane(static_cast<int>(threadIdx.x)) {
    if (a.split.keys == nullptr) return;
    const BatchKeys keys = a.split.keys[at.batch];
    const std::int32_t begin = max(at.row + keys.low, 0);
    const std::int32_t end = min(at.row + keys.high + 1, keys.columns);
    sees = at.row < keys.rows && begin < end;
    shares = sees && keys.begin < keys.end;
    if (!sees) return;
    const auto rows_of = [&](const void* tensor, const Strides& s, std::int32_t head) {
      return static_cast<const Element*>(tensor) + at.batch * s.batch + head * s.head;
    };
    const Operands& t = a.tensors;
    load(rows_of(t.query, t.query_strides, at.head) + at.row * t.query_strides.sequence, t.head_dim,
         query);
    key = rows_of(t.key, t.key_strides, kv_head);
    value = rows_of(t.value, t.value_strides, kv_head);
    add(begin, shares ? keys.begin : end);
    if (shares) add(keys.end, end);
  }

 private:
  __device__ void load(const Element* from, std::int32_t dims, float4 (&to)[kVectors]) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int dim = 4 * lane + 128 * i;
      to[i] = dim < dims ? load_four(from + dim) : float4{};
    }
  }

  __device__ float logit_of(const float4 (&x)[kVectors]) const {
    float product = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      product = fmaf(query[i].x, x[i].x, product);
      product = fmaf(query[i].y, x[i].y, product);
      product = fmaf(query[i].z, x[i].z, product);
      product = fmaf(query[i].w, x[i].w, product);
    }
    for (int distance = 1; distance < 32; distance *= 2) {
      product += __shfl_xor_sync(kAll, product, distance);
    }
    return a.soft_cap == 0 ? product * a.scale : a.soft_cap * tanhf(product * a.scale);
  }

  __device__ void add(std::int32_t begin, std::int32_t end) {
    for (std::int32_t column = begin; column < end; column += kAtOnce) {
      const int count = min(kAtOnce, end - column);
      float4 loaded[kAtOnce][kVectors];
      float logit[kAtOnce];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        if (c < count) {
          load(key + (column + c) * a.tensors.key_strides.sequence, a.tensors.head_dim, loaded[c]);
        }
      }
      float high = maximum;
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        logit[c] = c < count ? logit_of(loaded[c]) : -kInfinity;
        high = fmaxf(high, logit[c]);
      }
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        if (c < count) {
          load(value + (column + c) * a.tensors.value_strides.sequence, a.value_dim, loaded[c]);
        }
      }
      const float factor = exp2f(maximum - high);
      maximum = high;
      sum *= factor;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) output[i] = times(factor, output[i]);
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        if (c >= count) continue;
        const float weight = exp2f(logit[c] - high);
        sum += weight;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) flash::decode::add(output[i], weight, loaded[c][i]);
      }
    }
  }

  const DecodeArguments& a;
  int lane;
  float4 query[kVectors];
  const Element* key;
  const Element* value;
};

// One warp for each row of each query head.
template <class Element>
__global__ void merge(const __grid_constant__ DecodeArguments a) {
  const int lane = static_cast<int>(threadIdx.x);
  const auto pair = static_cast<std::int32_t>(blockIdx.x / static_cast<unsigned>(a.rows));
  const auto row = static_cast<std::int32_t>(blockIdx.x) - pair * a.rows;
  const std::int32_t batch = pair / a.kv_heads;
  const std::int32_t kv_head = pair - batch * a.kv_heads;
  const ResultRow at{batch, kv_head * a.heads_per_kv_head + row % a.heads_per_kv_head,
                     row / a.heads_per_kv_head};
  // While the parts are made: their kernel has begun, so what it reads is there.
  const OwnColumns<Element> own(a, at, kv_head);
  // Parts of neighbouring blocks are neighbours.
  const KeySplit split = a.split.of_call();
  const std::int64_t first = own.shares ? split.part(pair, split.first_block(pair)) : 0;
  const auto parts =
      own.shares ? static_cast<int>(split.part(pair, split.last_block(pair)) - first + 1) : 0;
  const float2* const weights = a.part_weights + first * a.rows + row;
  const float* const outputs = a.part_outputs + (first * a.rows + row) * a.value_dim;
  const std::int64_t output_stride = std::int64_t{a.rows} * a.value_dim;

  hopper::await_kernel_before();

  const bool has_state = a.state.output != nullptr;
  const double state_lse =
      has_state ? kLog2E64 * load_lse(a.state, at) : -static_cast<double>(kInfinity);
  const bool adds_state = state_lse != -static_cast<double>(kInfinity);
  float high = adds_state ? static_cast<float>(state_lse) : -kInfinity;
  high = fmaxf(high, own.maximum);
  for (int p = lane; p < parts; p += 32) high = fmaxf(high, weights[p * a.rows].x);
  for (int distance = 1; distance < 32; distance *= 2) {
    high = fmaxf(high, __shfl_xor_sync(kAll, high, distance));
  }
  float total = 0;
  for (int p = lane; p < parts; p += 32) {
    const float2 weight = weights[p * a.rows];
    total = fmaf(exp2f(weight.x - high), weight.y, total);
  }
  for (int distance = 1; distance < 32; distance *= 2) {
    total += __shfl_xor_sync(kAll, total, distance);
  }
  const float own_weight = exp2f(own.maximum - high);
  total = fmaf(own_weight, own.sum, total);
  const float state_weight = adds_state ? exp2f(static_cast<float>(state_lse - high)) : 0;
  total += state_weight;
  const float* const state =
      static_cast<const float*>(a.state.output) + (has_state ? output_offset(a.state, at) : 0);
  // True if the row saw columns whose logits were all −∞, here or in the state: see SoftmaxState.
  const bool saw = own.sees || (has_state && isnan(*state));
  const float scale = total != 0 ? 1 / total : saw ? kNan : 0;
  const std::int64_t to = output_offset(a.result, at);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int dim = 4 * lane + 128 * i;
    if (dim >= a.value_dim) continue;
    float4 sum = times(own_weight, own.output[i]);
    if (adds_state) add(sum, state_weight, *reinterpret_cast<const float4*>(state + dim));
#pragma unroll 8
    for (int p = 0; p < parts; ++p) {
      add(sum, exp2f(weights[p * a.rows].x - high),
          *reinterpret_cast<const float4*>(outputs + p * output_stride + dim));
    }
    if (a.wide_output) {
      *reinterpret_cast<float4*>(static_cast<float*>(a.result.output) + to + dim) =
          times(scale, sum);
    } else {
      *reinterpret_cast<uint2*>(static_cast<Element*>(a.result.output) + to + dim) = make_uint2(
          pack<Element>(sum.x * scale, sum.y * scale), pack<Element>(sum.z * scale, sum.w * scale));
    }
  }
  __syncwarp();  // all have read the state, which may lie where the result does
  if (lane != 0) return;
  const double lse = (high + log2(static_cast<double>(total))) * kLn2of64;
  store_lse(a.result, at, total == 0 ? -static_cast<double>(kInfinity) : lse);
}

}  // namespace

cudaError_t launch_merge(const DecodeArguments& arguments, bool half, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(arguments.split.pairs() * arguments.rows);
  return hopper::launch_early(half ? &merge<__half> : &merge<__nv_bfloat16>, blocks, 32, 0, stream,
                              arguments);
}

}  // namespace annulus::flash::decode
