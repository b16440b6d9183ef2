#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <annulus/core/convert.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/verification/for_tensor.hpp>
#include <annulus/verification/gradient_shards.hpp>

#include "filled_part.hpp"
#include "same_bits.hpp"

namespace annulus::verification {
namespace {

constexpr float kBefore = 0.25F;  // the value that gradients are added to; exact in every dtype

std::vector<double> numbers_of(const Tensor& tensor) {
  const ConstTensorView view = tensor.view();
  std::vector<double> wide(static_cast<std::size_t>(view.elements()));
  if (view.dtype() == DType::float64) {
    std::copy_n(view.as<double>(), wide.size(), wide.data());
    return wide;
  }
  std::vector<float> narrow(wide.size());
  to_float32(view.data(), view.dtype(), narrow.data(), view.elements());
  std::copy(narrow.begin(), narrow.end(), wide.begin());
  return wide;
}

void fill(const Tensor& tensor, float value) {
  const TensorView view = tensor.view();
  if (view.dtype() == DType::float64) {
    std::fill_n(view.as<double>(), view.elements(), value);
    return;
  }
  const std::vector<float> values(static_cast<std::size_t>(view.elements()), value);
  from_float32(values.data(), view.dtype(), view.data(), view.elements());
}

// Sums of squares over a rank's part of a gradient.
struct Squares {
  double difference = 0;
  double magnitude = 0;
};

// `before`: the size of the number that the gradient was added to.
void add_entry(Squares& sum, double found, double truth, double magnitude, double before) {
  double difference = found - truth;
  if (magnitude == 0 && difference != 0) difference = std::numeric_limits<double>::infinity();
  sum.difference += difference * difference;
  sum.magnitude += magnitude * magnitude + before * before;
}

// The value that gradients are added to, and its size as in add_entry().
struct Before {
  double value = 0;
  double size = 0;
};

Squares squares_of(const Tensor& found, const NamedSharding& sharding, int rank,
                   const OracleGradient& truth, const Before& before) {
  const std::vector<PositionRanges> index = sharding.index(rank);
  const Extents& whole = sharding.global_shape();
  const Extents& shape = found.shape();
  const std::vector<double> numbers = numbers_of(found);
  Squares sum;
  auto number = numbers.begin();
  const auto at = [&](std::size_t dim, std::int64_t local) {
    return index[dim].global(LocalPosition(local)).value();
  };
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t t = 0; t < shape[1]; ++t) {
      for (std::int64_t h = 0; h < shape[2]; ++h) {
        const std::int64_t row = (at(0, b) * whole[1] + at(1, t)) * whole[2] + at(2, h);
        for (std::int64_t d = 0; d < shape[3]; ++d, ++number) {
          const auto entry = static_cast<std::size_t>(row * shape[3] + d);
          add_entry(sum, *number - before.value, truth.values[entry], truth.magnitudes[entry],
                    before.size);
        }
      }
    }
  }
  return sum;
}

}  // namespace

GradientShards::GradientShards(const ring::ShardedOperands& operands,
                               const AttentionProblem& problem,
                               const ring::BackwardRequest& request, std::uint64_t seed,
                               Context& context)
    : operands_(operands),
      request_(request),
      rank_(context.rank()),
      device_(context.device()),
      copies_(device_.make_stream("copies", context.mesh().watchdog(), nullptr)) {
  const DType dtype = problem.dtype;
  collectively(context.mesh().world(), "gradients", [&] {
    const Computing filling = context.mesh().world().computing();
    const auto drawn = [&](Operand which, const std::vector<PositionRanges>& index,
                           const Extents& shape, DType type) {
      return filled_part(name_of(which), index, type,
                         operand_fill({}, shape, seed, which, context.threads()), host_);
    };
    const NamedSharding& output = operands.output;
    grad_output_ = {drawn(Operand::grad_output, output.index(rank_), output.global_shape(), dtype),
                    device_};
    if (request_.grad_lse) {
      std::vector<PositionRanges> index = operands.lse.index(rank_);
      index.push_back(PositionRanges::all(1));
      const Extents& rows = operands.lse.global_shape();
      grad_lse_ = {drawn(Operand::grad_lse, index, {rows[0], rows[1], rows[2], 1}, DType::float32),
                   device_};
    }
    const auto unfilled = [&](const char* name, const NamedSharding& sharding, DType type) {
      const Extents shape = sharding.local_shape(rank_);
      return for_tensor(name, [&] { return DeviceTwin(Tensor(type, shape, host_), device_); });
    };
    grad_query_ = unfilled("grad query", operands.query, dtype);
    grad_key_ = unfilled("grad key", operands.key, dtype);
    grad_value_ = unfilled("grad value", operands.value, dtype);
    if (request_.grad_bias) {
      grad_bias_ = unfilled("grad bias", operands.bias.value(), DType::float32);
    }
    if (request_.grad_sinks) {
      const bool shared = problem.sinks->shape().rank() == 1;
      const std::int64_t per_head = problem.sinks->per_head();
      const Extents shape =
          shared ? Extents{per_head} : Extents{operands.query.local_shape(rank_)[2], per_head};
      grad_sinks_ = {Tensor(DType::float32, shape, host_), device_};
      const PositionRanges heads = operands.query.positions(rank_, 2);
      if (!shared && !heads.empty()) {
        first_sink_ = heads.global(LocalPosition(0)).value() * per_head;
      }
    }
  });
}

void GradientShards::upload(int unwritten) {
  for (const DeviceTwin* one : gradients()) {
    if (request_.adds) {
      fill(one->host, kBefore);
    } else {
      std::memset(one->host.view().data(), unwritten, one->host.bytes());
    }
    one->upload(device_, *copies_);
  }
  for (const DeviceTwin* one : {&grad_output_, &grad_lse_}) one->upload(device_, *copies_);
  copies_->synchronize();
}

ring::BackwardLocalTensors GradientShards::tensors(const ring::LocalTensors& forward) const {
  ConstTensorView grad_lse;
  if (request_.grad_lse) {
    grad_lse = {grad_lse_.view().data(), DType::float32, forward.lse.shape(), forward.lse.place()};
  }
  return {forward.query,
          forward.key,
          forward.value,
          forward.output,
          forward.lse,
          grad_output_.view(),
          grad_query_.view(),
          grad_key_.view(),
          grad_value_.view(),
          forward.bias,
          forward.mask,
          grad_lse,
          forward.call_values,
          request_.grad_sinks ? grad_sinks_.view() : TensorView(),
          request_.grad_bias ? grad_bias_.view() : TensorView()};
}

void GradientShards::compute(Attention& attention, const ring::LocalTensors& forward,
                             int unwritten) {
  upload(unwritten);
  attention.backward_and_wait(tensors(forward), request_.adds);
  for (const DeviceTwin* one : gradients()) one->download(device_, *copies_);
  copies_->synchronize();
}

void GradientShards::compute_others(Attention& attention, const ring::LocalTensors& forward) {
  const std::size_t size = grad_output_.host.bytes();
  auto* const data = static_cast<std::byte*>(grad_output_.host.view().data());
  const std::vector<std::byte> given(data, data + size);
  std::memset(data, 0, size);
  compute(attention, forward);
  std::copy(given.begin(), given.end(), data);
}

bool GradientShards::are_parts_of(const GradientShards& whole) const {
  const auto same = [&](const DeviceTwin& part, const NamedSharding& sharding,
                        const DeviceTwin& all) {
    return is_part_of(part.host, sharding, rank_, all.host);
  };
  if (!same(grad_query_, operands_.query, whole.grad_query_) ||
      !same(grad_key_, operands_.key, whole.grad_key_) ||
      !same(grad_value_, operands_.value, whole.grad_value_)) {
    return false;
  }
  if (request_.grad_bias && !same(grad_bias_, operands_.bias.value(), whole.grad_bias_)) {
    return false;
  }
  if (!request_.grad_sinks) return true;
  const Tensor& sinks = grad_sinks_.host;
  const auto* const all = static_cast<const float*>(whole.grad_sinks_.host.view().data());
  return std::memcmp(sinks.view().data(), all + first_sink_, sinks.bytes()) == 0;
}

std::vector<std::vector<std::byte>> GradientShards::bytes() const {
  std::vector<std::vector<std::byte>> all;
  for (const DeviceTwin* one : gradients()) {
    const auto* const data = static_cast<const std::byte*>(one->host.view().data());
    all.emplace_back(data, data + one->host.bytes());
  }
  return all;
}

GradientErrors GradientShards::errors(const OracleGradients& truth, Control& group) const {
  const double before = request_.adds ? kBefore : 0;
  std::vector<double> squares;
  const auto add = [&](const DeviceTwin& found, const NamedSharding& sharding,
                       const OracleGradient& expected) {
    const Squares own = squares_of(found.host, sharding, rank_, expected, {before, before});
    squares.insert(squares.end(), {own.difference, own.magnitude});
  };
  add(grad_query_, operands_.query, truth.query);
  add(grad_key_, operands_.key, truth.key);
  add(grad_value_, operands_.value, truth.value);
  Squares of_sinks;
  // Sums over rows are float32 in every dtype, while the bound is in roundings of the dtype.
  const double float32 = unit_roundoff(DType::float32);
  const double narrow = float32 / std::max(float32, unit_roundoff(grad_output_.host.dtype()));
  if (request_.grad_sinks) {
    const std::vector<double> found = numbers_of(grad_sinks_.host);
    for (std::size_t i = 0; i < found.size(); ++i) {
      const std::size_t entry = static_cast<std::size_t>(first_sink_) + i;
      const double magnitude =
          std::sqrt(truth.sink_squares[entry]) + narrow * truth.sinks.magnitudes[entry];
      add_entry(of_sinks, found[i] - before, truth.sinks.values[entry], magnitude, narrow * before);
    }
  }
  squares.insert(squares.end(), {of_sinks.difference, of_sinks.magnitude});
  Squares of_bias;
  if (request_.grad_bias) {
    OracleGradient expected = truth.bias;
    for (std::size_t i = 0; i < expected.magnitudes.size(); ++i) {
      expected.magnitudes[i] = std::sqrt(truth.bias_squares[i]) + narrow * truth.bias.magnitudes[i];
    }
    of_bias = squares_of(grad_bias_.host, operands_.bias.value(), rank_, expected,
                         {before, narrow * before});
  }
  squares.insert(squares.end(), {of_bias.difference, of_bias.magnitude});
  const std::vector<double> sums = group.sum(squares, "errors of the gradients");
  GradientErrors errors{};
  for (std::size_t i = 0; i < errors.size(); ++i) {
    errors[i] = sums[2 * i] == 0 ? 0 : std::sqrt(sums[2 * i] / sums[2 * i + 1]);
  }
  return errors;
}

}  // namespace annulus::verification
