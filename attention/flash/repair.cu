#include "cuda/dropout.cuh"
#include "flash/kernels.hpp"
#include "flash/softmax.cuh"
#include "flash/visible.cuh"

namespace annulus::flash {
namespace {

constexpr int kRepairThreads = 256;

/// One row at a time, one warp for each, every visible column in turn.
template <class Element>
class RowRepair {
  static constexpr int kMaximumDims = 256;
  static constexpr int kPerLane = kMaximumDims / 32;

 public:
  __device__ RowRepair(const Arguments& arguments, const Operands& tensors, const Item& work)
      : a(arguments), t(tensors), item(work), lane(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run(std::int32_t row) {
    float query[kPerLane];
    load(t.query, t.query_strides, item.head, item.tile.first_row + row, t.head_dim, query);
    float output[kPerLane] = {};
    float maximum = -kInfinity;
    float sum = 0;
    if (a.state.output != nullptr) {
      maximum = static_cast<float>(load_lse(a.state, result_row(item, row)));
      if (maximum != -kInfinity) {
        sum = 1;
        const float* from = static_cast<const float*>(a.state.output) +
                            output_offset(a.state, result_row(item, row));
        for (int i = 0; i < kPerLane; ++i) {
          if (lane + 32 * i < a.value_dim) output[i] = from[lane + 32 * i];
        }
      }
    }
    if (row < item.tile.live_rows) {
      for (std::int32_t s = 0; s < item.tile.segments; ++s) {
        const KeySegment segment = a.segments[item.tile.first_segment + s];
        const bool masked = (segment.flags & KeySegment::kMasked) != 0;
        const std::int32_t columns = masked ? segment.columns : segment.tiles * a.tile_columns;
        for (std::int32_t c = 0; c < columns; ++c) {
          if (masked && !shows(segment, row, c)) continue;
          const std::int64_t position = segment.start + std::int64_t{segment.stride} * c;
          if (!scores_show(a, item, item.tile.first_row + row, score_key(a, segment, c))) continue;
          add(query, row, segment.first_column + c, position, output, maximum, sum);
        }
      }
    }
    const bool sees = sum != 0;
    const float without = !sees && saw_without_weight(a, item, row) ? kNan : 0.0f;
    __syncwarp();  // the state may lie where the result does
    const std::int64_t at = output_offset(a.result, result_row(item, row));
    for (int i = 0; i < kPerLane; ++i) {
      const int dim = lane + 32 * i;
      if (dim >= a.value_dim) continue;
      const float x = sees ? output[i] / sum : without;
      if (a.wide_output) {
        static_cast<float*>(a.result.output)[at + dim] = x;
      } else {
        static_cast<Element*>(a.result.output)[at + dim] = Element(x);
      }
    }
    const float lse = sees ? maximum + log2f(sum) * kLn2 : -kInfinity;
    if (lane == 0) store_lse(a.result, result_row(item, row), lse);
  }

 private:
  __device__ void load(const void* tensor, const Strides& strides, std::int32_t head,
                       std::int64_t position, std::int32_t dims, float (&x)[kPerLane]) const {
    const Element* row = static_cast<const Element*>(tensor) + item.batch * strides.batch +
                         head * strides.head + position * strides.sequence;
    for (int i = 0; i < kPerLane; ++i) {
      x[i] = lane + 32 * i < dims ? static_cast<float>(row[lane + 32 * i]) : 0.0f;
    }
  }

  [[nodiscard]] __device__ bool shows(const KeySegment& segment, std::int32_t row,
                                      std::int32_t column) const {
    const std::int32_t ahead = item.tile.row_stride * row;
    const std::int32_t at = segment.stride * column;
    if (at < segment.low + ahead || at > segment.high + ahead) return false;
    const std::int64_t list = a.batch_has_list ? item.batch : 0;
    const std::int64_t row_at = list * a.rows + item.tile.first_row + row;
    if (a.row_keys != nullptr) {
      const Document keys = row_keys_of(a, segment, row_at);
      const std::int32_t position = segment.start + at;
      if (position < keys.begin || position >= keys.end) return false;
    }
    if (a.row_ids != nullptr) {
      return a.row_ids[row_at] >= 0 &&
             a.row_ids[row_at] == a.column_ids[list * a.columns + segment.first_column + column];
    }
    return true;
  }

  // Adds one column.
  __device__ void add(const float (&query)[kPerLane], std::int32_t row, std::int64_t column,
                      std::int64_t position, float (&output)[kPerLane], float& maximum,
                      float& sum) const {
    const std::int32_t kv_head = item.head / a.heads_per_kv_head;
    float x[kPerLane];
    load(t.key, t.key_strides, kv_head, column, t.head_dim, x);
    float logit = 0;
    for (int i = 0; i < kPerLane; ++i) logit += query[i] * x[i];
    for (int distance = 16; distance > 0; distance /= 2) {
      logit += __shfl_xor_sync(0xffffffff, logit, distance);
    }
    logit *= a.scale;
    if (a.soft_cap != 0) logit = a.soft_cap * tanhf(logit);
    const auto& bias = a.scores.bias;
    if (bias.data != nullptr) {
      const std::int64_t key = a.scores.key_of(column, position);
      logit += bias.row(item.batch, item.head, item.tile.first_row + row)[key * bias.strides[3]];
    }
    const float larger = fmaxf(maximum, logit);
    const float shift = larger == -kInfinity ? 0.0f : larger;
    const float factor = exp2f((maximum - shift) * kLog2E);
    const float weight = exp2f((logit - shift) * kLog2E);
    maximum = larger;
    sum = sum * factor + weight;
    float kept = weight;
    if (a.dropout.threshold != 0) {
      const std::int64_t i = item.tile.start + std::int64_t{item.tile.row_stride} * row;
      kept = cuda::drops(a.dropout, item.batch, item.head, i, position)
                 ? 0.0f
                 : weight * a.dropout.keep_scale;
    }
    load(t.value, t.value_strides, kv_head, column, a.value_dim, x);
    for (int i = 0; i < kPerLane; ++i) output[i] = output[i] * factor + kept * x[i];
  }

  const Arguments& a;
  const Operands& t;
  const Item& item;
  int lane;
};

/// Computes the items that attend() left out, and empties their list.
template <class Element>
__global__ void __launch_bounds__(kRepairThreads, 1)
    repair(const __grid_constant__ Arguments a, const __grid_constant__ Operands tensors) {
  __shared__ Item item;
  const std::int32_t count = *a.repair;  // not emptied before all blocks are through
  for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x); i < count;
       i += static_cast<std::int32_t>(gridDim.x)) {
    __syncthreads();
    if (threadIdx.x == 0) describe_item(a, a.repair[1 + i], item);
    __syncthreads();
    for (std::int32_t row = static_cast<std::int32_t>(threadIdx.x) / 32; row < item.tile.rows;
         row += kRepairThreads / 32) {
      RowRepair<Element>(a, tensors, item).run(row);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(a.counters + 2, 1) == static_cast<std::int32_t>(gridDim.x) - 1) {
      a.counters[2] = 0;
      *a.repair = 0;
    }
  }
}

}  // namespace

cudaError_t launch_repair(const Arguments& arguments, const Operands& tensors, bool half,
                          int blocks, cudaStream_t stream) {
  const auto launch = [&](auto* kernel) {
    kernel<<<blocks, kRepairThreads, 0, stream>>>(arguments, tensors);
    return cudaGetLastError();
  };
  return half ? launch(&repair<__half>) : launch(&repair<__nv_bfloat16>);
}

}  // namespace annulus::flash
