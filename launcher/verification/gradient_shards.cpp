#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <annulus/core/convert.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/verification/for_tensor.hpp>
#include <annulus/verification/gradient_shards.hpp>

#include "entries.hpp"
#include "filled_part.hpp"
#include "same_bits.hpp"

namespace annulus::verification {
namespace {

constexpr float kBefore = 0.25F;  // the value that gradients are added to; exact in every dtype

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
  const std::vector<double> numbers = numbers_of(found);
  Squares sum;
  for_each_entry(sharding.index(rank), [&](const Entry& entry, std::int64_t i) {
    const std::size_t number = number_of(entry, sharding.global_shape());
    add_entry(sum, numbers[static_cast<std::size_t>(i)] - before.value, truth.values[number],
              truth.magnitudes[number], before.size);
  });
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
    grad_output_ = {random_grad_output(operands, dtype, seed, rank_, host_, context.threads()),
                    device_};
    if (request_.grad_lse) {
      grad_lse_ = {random_grad_lse(operands, seed, rank_, host_, context.threads()), device_};
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
  const std::vector<std::byte> given = bytes_of(grad_output_.host);
  grad_output_.host.fill_zero();
  compute(attention, forward);
  std::memcpy(grad_output_.host.view().data(), given.data(), given.size());
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
  for (const DeviceTwin* one : gradients()) all.push_back(bytes_of(one->host));
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
