#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/core/error.hpp>
#include <annulus/ring/local_operations.hpp>

#include "exact_sum.hpp"
#include "runner/cuda/cuda_operations.hpp"

namespace annulus::ring {
namespace {

// Calls body(first element of a row in every view) for all rows, which are runs of the last
// dimension.
template <class Body>
void for_each_row(const TensorView& view, const Body& body) {
  std::int64_t rows = 1;
  for (int dim = 0; dim + 1 < view.rank(); ++dim) rows *= view.size(dim);
  for (std::int64_t row = 0; row < rows; ++row) {
    body([row, &view](const auto& other) {
      std::int64_t offset = 0;
      std::int64_t rest = row;
      for (int dim = view.rank() - 2; dim >= 0; --dim) {
        offset += rest % view.size(dim) * other.stride(dim);
        rest /= view.size(dim);
      }
      return offset;
    });
  }
}

// Widens contiguous numbers of any floating dtype.
template <class T>
void read_row(const void* from, DType dtype, std::span<T> to) {
  if (dtype == DType::float64) {
    std::copy_n(static_cast<const double*>(from), to.size(), to.begin());
    return;
  }
  if constexpr (std::is_same_v<T, float>) {
    to_float32(from, dtype, to.data(), static_cast<std::int64_t>(to.size()));
  } else {
    std::vector<float> narrow(to.size());
    to_float32(from, dtype, narrow.data(), static_cast<std::int64_t>(to.size()));
    std::copy(narrow.begin(), narrow.end(), to.begin());
  }
}

// T: what is added in. A sum begins with its first part, so that the sum of one part keeps a −0.
template <class T>
void sum_rows(std::span<const ConstTensorView> parts, const TensorView& result) {
  const std::int64_t width = result.size(result.rank() - 1);
  std::vector<T> total(static_cast<std::size_t>(width)), part(total.size());
  const auto address = [](const auto& view, std::int64_t offset) {
    return static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(view.data()))) +
           offset * static_cast<std::int64_t>(size_of(view.dtype()));
  };
  for_each_row(result, [&](const auto& offset_in) {
    std::fill(total.begin(), total.end(), T{0});
    for (std::size_t p = 0; p < parts.size(); ++p) {
      std::vector<T>& read = p == 0 ? total : part;
      read_row<T>(address(parts[p], offset_in(parts[p])), parts[p].dtype(), read);
      for (std::size_t i = 0; p > 0 && i < total.size(); ++i) total[i] += part[i];
    }
    void* const to = address(result, offset_in(result));
    if constexpr (std::is_same_v<T, double>) {
      std::copy(total.begin(), total.end(), static_cast<double*>(to));
    } else {
      from_float32(total.data(), result.dtype(), to, width);
    }
  });
}

// On the CPU, a stream runs work at once.
class HostOperations final : public LocalOperations {
 public:
  void combine(std::span<const PartialState> parts, const SoftmaxState& result, SoftmaxForm form,
               Stream& /*stream*/) const override {
    annulus::combine(parts, result, form);
  }
  void sum(std::span<const ConstTensorView> parts, const TensorView& result,
           Stream& /*stream*/) const override {
    for (const ConstTensorView& part : parts) {
      if (!(part.shape() == result.shape())) throw InternalError("a sum of different shapes");
    }
    if (result.elements() == 0) return;
    if (result.dtype() == DType::float64) {
      sum_rows<double>(parts, result);
    } else {
      sum_rows<float>(parts, result);
    }
  }
  void delta(const ConstTensorView& output, const ConstTensorView& grad_output,
             const ConstTensorView& grad_lse, const TensorView& delta,
             Stream& /*stream*/) const override {
    const auto width = static_cast<std::size_t>(output.size(3));
    std::vector<double> o(width), g(width);
    for (std::int64_t b = 0; b < output.size(0); ++b) {
      for (std::int64_t t = 0; t < output.size(1); ++t) {
        for (std::int64_t n = 0; n < output.size(2); ++n) {
          read_row<double>(output.address({b, t, n, 0}), output.dtype(), o);
          read_row<double>(grad_output.address({b, t, n, 0}), grad_output.dtype(), g);
          double sum = 0;
          const bool is_zero = std::all_of(o.begin(), o.end(), [](double x) { return x == 0; });
          for (std::size_t d = 0; d < width && !is_zero; ++d) sum += o[d] * g[d];
          if (grad_lse.rank() > 0) {
            double gradient = 0;
            read_row<double>(grad_lse.address({b, n, t}), grad_lse.dtype(), {&gradient, 1});
            sum -= gradient;
          }
          if (delta.dtype() == DType::float64) {
            delta.at<double>({b, n, t}) = sum;
          } else {
            delta.at<float>({b, n, t}) = static_cast<float>(sum);
          }
        }
      }
    }
  }
  void sink_gradient(const ConstTensorView& sinks, const ConstTensorView& lse,
                     const ConstTensorView& delta, const TensorView& grad_sinks,
                     Stream& /*stream*/) const override {
    const std::int64_t per_head = sinks.size(1);
    const std::int64_t shared = sinks.size(0) == 1 ? delta.size(1) : 1;
    const bool in_parts = grad_sinks.size(1) == static_cast<std::int64_t>(kExactParts);
    const auto number = [](const ConstTensorView& tensor, std::initializer_list<std::int64_t> at) {
      double value = 0;
      read_row<double>(tensor.address(at), tensor.dtype(), {&value, 1});
      return value;
    };
    for (std::int64_t n = 0; n < sinks.size(0); ++n) {
      std::vector<double> sums(static_cast<std::size_t>(per_head));
      std::vector<ExactSum> exact(in_parts ? sums.size() : 0);
      for (std::int64_t head = n * shared; head < (n + 1) * shared; ++head) {
        for (std::int64_t b = 0; b < delta.size(0); ++b) {
          for (std::int64_t t = 0; t < delta.size(2); ++t) {
            const double of_row = number(lse, {b, head, t});
            if (of_row == -std::numeric_limits<double>::infinity()) continue;
            const double gradient = number(delta, {b, head, t});
            for (std::int64_t m = 0; m < per_head; ++m) {
              const double term = -std::exp(number(sinks, {n, m}) - of_row) * gradient;
              if (in_parts) {
                add_exactly(term, exact[static_cast<std::size_t>(m)]);
              } else {
                sums[static_cast<std::size_t>(m)] += term;
              }
            }
          }
        }
      }
      for (std::int64_t m = 0; m < per_head; ++m) {
        const auto sink = static_cast<std::size_t>(m);
        if (!in_parts) grad_sinks.at<float>({0, 0, n, m}) = static_cast<float>(sums[sink]);
        for (std::int64_t i = 0; in_parts && i < grad_sinks.size(1); ++i) {
          grad_sinks.at<double>({0, i, n, m}) = exact[sink][static_cast<std::size_t>(i)];
        }
      }
    }
  }
  void publish(std::int32_t /*value*/, std::int32_t* /*number*/,
               Stream& /*stream*/) const override {
    throw InternalError("no CPU kernel awaits columns");
  }
  void sink_state(const ConstTensorView& sinks, const TensorView& logits, const TensorView& lse,
                  const TensorView& maximum, Stream& /*stream*/) const override {
    const std::int64_t per_head = logits.size(1);
    for (std::int64_t n = 0; n < logits.size(0); ++n) {
      const auto* const from =
          static_cast<const float*>(sinks.data()) + (sinks.rank() == 1 ? 0 : n * sinks.stride(0));
      std::copy_n(from, per_head, logits.as<float>() + n * per_head);
    }
    for (std::int64_t head = 0; head < lse.size(0); ++head) {
      const std::int64_t n = logits.size(0) == 1 ? 0 : head;
      const std::span of_head(logits.as<float>() + n * per_head,
                              static_cast<std::size_t>(per_head));
      const double log_sum = log_sum_exp(of_head);
      if (lse.dtype() == DType::float64) {
        lse.as<double>()[head] = log_sum;
      } else {
        lse.as<float>()[head] = static_cast<float>(log_sum);
      }
      if (maximum.rank() > 0) maximum.as<float>()[head] = std::ranges::max(of_head);
    }
  }
  void write(const CallArgumentWrite& /*write*/, Stream& /*stream*/) const override {
    throw InternalError("CPU kernels read call arguments from the problem");
  }
};

}  // namespace

std::unique_ptr<LocalOperations> make_local_operations(Place place) {
  if (!place.is_host()) return make_cuda_operations();
  return std::make_unique<HostOperations>();
}

}  // namespace annulus::ring
