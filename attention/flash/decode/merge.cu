#include "flash/decode/early_launch.cuh"
#include "flash/decode/kernels.hpp"
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
  // Parts of neighbouring blocks are neighbours.
  const std::int64_t first = a.split.part(pair, a.split.first_block(pair));
  const auto parts = static_cast<int>(a.split.part(pair, a.split.last_block(pair)) - first + 1);
  const float2* const weights = a.part_weights + first * a.rows + row;
  const float* const outputs = a.part_outputs + (first * a.rows + row) * a.value_dim;
  const std::int64_t output_stride = std::int64_t{a.rows} * a.value_dim;

  await_kernel_before();

  const bool has_state = a.state.output != nullptr;
  const double state_lse =
      has_state ? kLog2E64 * load_lse(a.state, at) : -static_cast<double>(kInfinity);
  const bool adds_state = state_lse != -static_cast<double>(kInfinity);
  float high = adds_state ? static_cast<float>(state_lse) : -kInfinity;
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
  const float state_weight = adds_state ? exp2f(static_cast<float>(state_lse - high)) : 0;
  total += state_weight;
  // All logits were −∞: see SoftmaxState.
  const float scale = total == 0 ? kNan : 1 / total;

  const float* const state =
      static_cast<const float*>(a.state.output) + (has_state ? output_offset(a.state, at) : 0);
  const std::int64_t to = output_offset(a.result, at);
  for (int dim = 4 * lane; dim < a.value_dim; dim += 128) {
    float4 sum = {};
    if (adds_state) add(sum, state_weight, *reinterpret_cast<const float4*>(state + dim));
#pragma unroll 8
    for (int p = 0; p < parts; ++p) {
      add(sum, exp2f(weights[p * a.rows].x - high),
          *reinterpret_cast<const float4*>(outputs + p * output_stride + dim));
    }
    if (a.wide_output) {
      *reinterpret_cast<float4*>(static_cast<float*>(a.result.output) + to + dim) =
          make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
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
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(arguments.split.pairs * arguments.rows));
  config.blockDim = dim3(32);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return half ? cudaLaunchKernelEx(&config, &merge<__half>, arguments)
              : cudaLaunchKernelEx(&config, &merge<__nv_bfloat16>, arguments);
}

}  // namespace annulus::flash::decode
