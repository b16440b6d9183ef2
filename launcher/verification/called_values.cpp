#include "called_values.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <annulus/mesh/mesh.hpp>

namespace annulus::verification {
namespace {

using Numbers = std::vector<std::int32_t>;

std::uint64_t seed_of(const AttentionProblem& problem, bool other) {
  return other ? ~problem.dropout->seed() : problem.dropout->seed();
}

Sinks sinks_of(const Sinks& sinks, bool other) {
  if (!other) return sinks;
  const Extents& shape = sinks.shape();
  std::vector<float> logits;
  for (std::int64_t head = 0; head < (shape.rank() == 1 ? 1 : shape[0]); ++head) {
    for (const float logit : sinks.of_head(head)) logits.push_back(1 - logit / 2);
  }
  for (float& logit : logits) logit = std::min(logit, 3.0F);  // some are −∞
  return {shape, std::move(logits)};
}

}  // namespace

AttentionProblem planned_problem(const ShardedCase& sharded_case) {
  AttentionProblem problem = sharded_case.problem;
  const CallArguments& arguments = problem.call_arguments;
  if (arguments.lengths) {
    problem.mask.set_query_lengths({});
    problem.mask.set_kv_lengths({});
  }
  if (arguments.offsets) problem.mask.set_offset(1);
  if (arguments.dropout_seed) {
    problem.dropout.emplace(problem.dropout->probability(), seed_of(problem, true));
  }
  if (sharded_case.called.sinks) problem.sinks = sinks_of(*problem.sinks, true);
  return problem;
}

CalledValues::CalledValues(const ShardedCase& sharded_case, const ring::ShardedOperands& operands,
                           Context& context)
    : any_(sharded_case.problem.call_arguments.any() || sharded_case.called.sinks),
      in_device_memory_(sharded_case.called.in_device_memory) {
  if (!any_) return;
  const AttentionProblem& problem = sharded_case.problem;
  const CallArguments& arguments = problem.call_arguments;
  Device& device = context.device();
  const auto copies = device.make_stream("copies", context.mesh().watchdog(), nullptr);
  // Host values are not copied.
  const auto twin = [&](DType dtype, const Extents& shape, const void* data, bool on_device) {
    Tensor host(dtype, shape, host_);
    std::memcpy(host.view().data(), data, host.bytes());
    DeviceTwin made = on_device ? DeviceTwin(std::move(host), device) : DeviceTwin(std::move(host));
    made.upload(device, *copies);
    return made;
  };
  const auto numbers = [&](const Numbers& all) {
    return twin(DType::int32, {std::ssize(all)}, all.data(), in_device_memory_);
  };
  const PositionRanges batches = operands.query.positions(context.rank(), 0);
  const auto of_rank = [&](const Numbers& all, std::int64_t longest, bool other) {
    Numbers own;
    for (std::int64_t b = 0; b < batches.size(); ++b) {
      const std::int32_t number =
          all[static_cast<std::size_t>(batches.global(LocalPosition(b)).value())];
      own.push_back(other ? static_cast<std::int32_t>(longest - number) : number);
    }
    return numbers(own);
  };
  const auto fill = [&](Values& values, bool other) {
    const Mask& mask = problem.mask;
    const AttentionShape& shape = problem.shape;
    if (arguments.lengths && !mask.query_lengths().empty()) {
      values.query_lengths = of_rank(mask.query_lengths(), shape.query_length, other);
    }
    if (arguments.lengths && !mask.kv_lengths().empty()) {
      values.kv_lengths = of_rank(mask.kv_lengths(), shape.kv_length, other);
    }
    if (arguments.offsets && !mask.offsets().empty()) {
      values.offsets = of_rank(mask.offsets(), 1, other);
    } else if (arguments.offsets) {
      values.offsets =
          numbers({static_cast<std::int32_t>(other ? 1 - mask.offset() : mask.offset())});
    }
    if (arguments.dropout_seed) {
      const std::uint64_t seed = seed_of(problem, other);
      values.seed = twin(DType::int32, {2}, &seed, in_device_memory_);
    }
    if (sharded_case.called.sinks) {
      const Sinks sinks = sinks_of(*problem.sinks, other);
      const bool shared = sinks.shape().rank() == 1;
      const PositionRanges heads = operands.query.positions(context.rank(), 2);
      std::vector<float> logits;
      for (std::int64_t n = 0; n < (shared ? 1 : heads.size()); ++n) {
        const auto head = sinks.of_head(shared ? 0 : heads.global(LocalPosition(n)).value());
        logits.insert(logits.end(), head.begin(), head.end());
      }
      const Extents all =
          shared ? Extents{sinks.per_head()} : Extents{heads.size(), sinks.per_head()};
      values.sinks = twin(DType::float32, all, logits.data(), true);
    }
  };
  fill(own_, false);
  fill(others_, true);
  copies->synchronize();
}

ring::CallValues CalledValues::values_of(const Values& values) const {
  const auto view = [](const DeviceTwin& twin) {
    return twin.host.shape().rank() == 0 ? ConstTensorView() : ConstTensorView(twin.view());
  };
  ring::CallValues called{view(values.query_lengths), view(values.kv_lengths),
                          view(values.offsets)};
  called.sinks = view(values.sinks);
  if (values.seed.host.shape().rank() == 0) return called;
  const void* const seed = values.seed.view().data();
  if (in_device_memory_) {
    called.device_dropout_seed = static_cast<const std::uint64_t*>(seed);
  } else {
    std::uint64_t number = 0;
    std::memcpy(&number, seed, sizeof(number));
    called.dropout_seed = number;
  }
  return called;
}

}  // namespace annulus::verification
