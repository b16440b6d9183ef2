#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <annulus/core/convert.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/verification/filled_part.hpp>
#include <annulus/verification/for_tensor.hpp>
#include <annulus/verification/gradient_shards.hpp>

#include "entries.hpp"

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

// `before`: the value that the gradient was added to; `size`: its effect on magnitudes.
Squares squares_of(const Tensor& found, const NamedSharding& sharding, int rank,
                   const OracleGradient& truth, double before, double size) {
  const std::vector<double> numbers = numbers_of(found);
  Squares sum;
  for_each_entry(sharding.index(rank), [&](const Entry& entry, std::int64_t i) {
    const std::size_t number = number_of(entry, sharding.global_shape());
    const double magnitude = truth.magnitudes[number];
    double difference = numbers[static_cast<std::size_t>(i)] - before - truth.values[number];
    if (magnitude == 0 && difference != 0) difference = std::numeric_limits<double>::infinity();
    sum.difference += difference * difference;
    sum.magnitude += magnitude * magnitude + size * size;
  });
  return sum;
}

// A gradient of sinks or bias, with the magnitudes of docs/semantics.md §6: it sums terms of many
// rows, which may cancel. `narrow`: the roundoff of sums, as a share of the dtype's roundoff.
OracleGradient sum_of_rows(OracleGradient gradient, const std::vector<double>& squares,
                           double narrow) {
  for (std::size_t i = 0; i < gradient.magnitudes.size(); ++i) {
    gradient.magnitudes[i] = std::sqrt(squares[i]) + narrow * gradient.magnitudes[i];
  }
  return gradient;
}

}  // namespace

NamedSharding sinks_sharding(const NamedSharding& query, const Extents& sinks) {
  std::vector<AxisNames> axes;
  if (sinks.rank() == 2) axes.push_back(query.spec()[2]);
  return {query.mesh(), PartitionSpec(axes), sinks};
}

ring::BackwardLocalTensors backward_tensors(const ring::LocalTensors& forward) {
  ring::BackwardLocalTensors tensors;
  tensors.query = forward.query;
  tensors.key = forward.key;
  tensors.value = forward.value;
  tensors.output = forward.output;
  tensors.lse = forward.lse;
  tensors.bias = forward.bias;
  tensors.mask = forward.mask;
  tensors.call_values = forward.call_values;
  return tensors;
}

GradientShards::GradientShards(const ring::ShardedOperands& operands,
                               const AttentionProblem& problem,
                               const ring::BackwardRequest& request, std::uint64_t seed,
                               Context& context)
    : request_(request),
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
    using Tensors = ring::BackwardLocalTensors;
    const auto add = [&](std::size_t number, const char* name, TensorView Tensors::*tensor,
                         const NamedSharding& sharding, DType type) {
      const Extents shape = sharding.local_shape(rank_);
      gradients_.push_back({number, tensor, sharding, for_tensor(name, [&] {
                              return DeviceTwin(Tensor(type, shape, host_), device_);
                            })});
    };
    add(0, "grad query", &Tensors::grad_query, operands.query, dtype);
    add(1, "grad key", &Tensors::grad_key, operands.key, dtype);
    add(2, "grad value", &Tensors::grad_value, operands.value, dtype);
    if (request_.grad_sinks) {
      add(3, "grad sinks", &Tensors::grad_sinks,
          sinks_sharding(operands.query, problem.sinks->shape()), DType::float32);
    }
    if (request_.grad_bias) {
      add(4, "grad bias", &Tensors::grad_bias, operands.bias.value(), DType::float32);
    }
  });
}

void GradientShards::upload(int unwritten) {
  for (const auto& [number, tensor, sharding, twin] : gradients_) {
    if (request_.adds) {
      fill(twin.host, kBefore);
    } else {
      std::memset(twin.host.view().data(), unwritten, twin.host.bytes());
    }
    twin.upload(device_, *copies_);
  }
  for (const DeviceTwin* one : {&grad_output_, &grad_lse_}) one->upload(device_, *copies_);
  copies_->synchronize();
}

ring::BackwardLocalTensors GradientShards::tensors(const ring::LocalTensors& forward) const {
  ring::BackwardLocalTensors tensors = backward_tensors(forward);
  tensors.grad_output = grad_output_.view();
  if (request_.grad_lse) {
    tensors.grad_lse = {grad_lse_.view().data(), DType::float32, forward.lse.shape(),
                        forward.lse.place()};
  }
  for (const Gradient& one : gradients_) tensors.*one.tensor = one.twin.view();
  return tensors;
}

void GradientShards::compute(Attention& attention, const ring::LocalTensors& forward,
                             int unwritten) {
  upload(unwritten);
  attention.backward_and_wait(tensors(forward), request_.adds);
  for (const Gradient& one : gradients_) one.twin.download(device_, *copies_);
  copies_->synchronize();
}

void GradientShards::compute_others(Attention& attention, const ring::LocalTensors& forward) {
  const std::vector<std::byte> given = bytes_of(grad_output_.host);
  grad_output_.host.fill_zero();
  compute(attention, forward);
  std::memcpy(grad_output_.host.view().data(), given.data(), given.size());
}

bool GradientShards::are_parts_of(const GradientShards& whole) const {
  return std::equal(gradients_.begin(), gradients_.end(), whole.gradients_.begin(),
                    [&](const Gradient& part, const Gradient& all) {
                      return is_part_of(part.twin.host, part.sharding, rank_, all.twin.host);
                    });
}

std::vector<std::vector<std::byte>> GradientShards::bytes() const {
  std::vector<std::vector<std::byte>> all;
  for (const Gradient& one : gradients_) all.push_back(bytes_of(one.twin.host));
  return all;
}

GradientErrors GradientShards::errors(const OracleGradients& truth, Control& group) const {
  // Sums over rows are float32 in every dtype, while the bound is in roundings of the dtype.
  const double float32 = unit_roundoff(DType::float32);
  const double narrow = float32 / std::max(float32, unit_roundoff(grad_output_.host.dtype()));
  const OracleGradient sinks = sum_of_rows(truth.sinks, truth.sink_squares, narrow);
  const OracleGradient bias = sum_of_rows(truth.bias, truth.bias_squares, narrow);
  const std::array expected{&truth.query, &truth.key, &truth.value, &sinks, &bias};
  const double before = request_.adds ? kBefore : 0;
  std::vector<double> squares(2 * expected.size());
  for (const auto& [number, tensor, sharding, twin] : gradients_) {
    const bool sums_rows = expected.at(number) == &sinks || expected.at(number) == &bias;
    const Squares own = squares_of(twin.host, sharding, rank_, *expected.at(number), before,
                                   sums_rows ? narrow * before : before);
    squares[2 * number] = own.difference;
    squares[2 * number + 1] = own.magnitude;
  }
  const std::vector<double> sums = group.sum(squares, "errors of the gradients");
  GradientErrors errors{};
  for (std::size_t i = 0; i < errors.size(); ++i) {
    errors[i] = sums[2 * i] == 0 ? 0 : std::sqrt(sums[2 * i] / sums[2 * i + 1]);
  }
  return errors;
}

}  // namespace annulus::verification
