#pragma once

#include <cstdint>
#include <string>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/error.hpp>

// Views of softmax states for kernels, and checks of states that are handed over.
namespace annulus::cuda {

inline void check(bool fits, const SoftmaxState& state, const char* what) {
  if (fits) return;
  throw InternalError(std::string(what) + ": " + std::string(name_of(state.output.dtype())) +
                      " output " + to_string(state.output.shape()) + " strides " +
                      to_string(state.output.strides()) + " with LSE " +
                      std::string(name_of(state.lse.dtype())) + " " + to_string(state.lse.shape()));
}

inline void check_state(const SoftmaxState& state, const char* what) {
  const TensorView& output = state.output;
  check(output.rank() == 4 && (output.size(3) <= 1 || output.stride(3) == 1), state, what);
  check((state.lse.dtype() == DType::float32 || state.lse.dtype() == DType::float64) &&
            state.lse.shape() == Extents{output.size(0), output.size(2), output.size(1)},
        state, what);
}

// An LSE of either dtype, [b,n,t].
struct Lse {
  void* data;
  std::int64_t strides[3];
  bool wide;  // float64

  __device__ std::int64_t at(unsigned b, unsigned n, unsigned t) const {
    return b * strides[0] + n * strides[1] + t * strides[2];
  }
  __device__ double get(unsigned b, unsigned n, unsigned t) const {
    return wide ? static_cast<const double*>(data)[at(b, n, t)]
                : static_cast<double>(static_cast<const float*>(data)[at(b, n, t)]);
  }
  __device__ void set(unsigned b, unsigned n, unsigned t, double value) const {
    if (wide) {
      static_cast<double*>(data)[at(b, n, t)] = value;
    } else {
      static_cast<float*>(data)[at(b, n, t)] = static_cast<float>(value);
    }
  }
};

inline Lse lse_of(const TensorView& view) {
  return {view.data(),
          {view.stride(0), view.stride(1), view.stride(2)},
          view.dtype() == DType::float64};
}

inline void check_part(const PartialState& part, const SoftmaxState& result) {
  const Extents& whole = result.output.shape();
  const Extents& own = part.state.output.shape();
  check_state(part.state, "combine");
  check(own[0] == whole[0] && own[3] == whole[3] && part.first_row >= 0 &&
            part.first_row + own[1] <= whole[1] && part.first_head >= 0 &&
            part.first_head + own[2] <= whole[2],
        part.state, "combine: a part that lies outside");
}

}  // namespace annulus::cuda
