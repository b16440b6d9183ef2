#include "launcher/bench/kernel_blocks.hpp"

#include <cstddef>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus::launcher {
namespace {

// The problem on a rank of its own.
ProblemSetup set_up_alone(Options options, std::int64_t length) {
  AttentionShape shape = *options.shape;
  shape.query_length = shape.kv_length = length;
  options.mesh = "sp=1";
  options.query_spec = options.kv_spec = "-";
  return set_up_problem(options, shape, options.dtype.value_or(DType::float32), 1);
}

ConstTensorView first_rows(const ConstTensorView& tensor, std::int64_t rows) {
  return tensor.slice(1, 0, rows);
}

}  // namespace

KernelBlocks::KernelBlocks(const Options& options, std::int64_t length, Device& device,
                           Watchdog watchdog, int threads)
    : device_(device),
      threads_(threads),
      setup_(set_up_alone(options, length)),
      shards_(shard_operands(setup_), setup_.problem.dtype, options.seed, 0, device.staging(),
              threads, setup_.fills),
      tensors_(shards_.local_tensors(), device, watchdog),
      stream_(device.make_stream("compute", std::move(watchdog), nullptr)),
      selection_(registry_.select(options.implementation, setup_.problem, device.place())) {
  tensors_.upload();
  const AttentionShape& s = setup_.problem.shape;
  scores_ = broadcast_scores(tensors_.tensors().bias, tensors_.tensors().mask,
                             {s.batch, s.heads, s.query_length, s.kv_length});
}

void KernelBlocks::select(std::int64_t rows) {
  const AttentionProblem& problem = setup_.problem;
  const PositionRange range{GlobalPosition(0), rows, 1};
  const Visibility seen = problem.mask.examine(0, problem.shape.batch, range, range);
  if (seen.empty()) {
    throw ArgumentError("--calibrate", fmt::format("a mask that hides all of {} rows", rows),
                        "visible pairs to compute");
  }
  flops_ = forward_flops(problem.shape, static_cast<double>(seen.pairs));
  extent_ = {rows, rows, problem.shape.heads, problem.shape.batch, seen.pairs};
  const ring::LocalTensors& tensors = tensors_.tensors();
  block_ = {first_rows(tensors.query, rows),
            first_rows(tensors.key, rows),
            first_rows(tensors.value, rows),
            PositionRanges::all(rows),
            PositionRanges::all(rows),
            0,
            0,
            seen.full,
            {},
            scores_.slice(2, 0, rows)};
  for (auto& [implementation, candidate] : candidates_) candidate.call.reset();
}

std::string KernelBlocks::prepare(const Implementation& candidate) {
  const AttentionProblem& problem = setup_.problem;
  const std::int64_t group = problem.shape.heads / problem.shape.kv_heads;
  if (block_.unmasked &&
      candidate.few_rows(problem).include(extent_.rows, group, extent_.heads * extent_.batches,
                                          extent_.columns)) {
    return "so few rows are computed by a kernel of their own, which takes as long as reading";
  }
  std::string obstacle = candidate.takes(problem, geometry_of(block_)).reason();
  if (!obstacle.empty()) return obstacle;
  Candidate& chosen = candidates_[&candidate];
  if (!chosen.kernel) {
    chosen.kernel = candidate.make_kernel(problem, device_);
    // Partial results, as the blocks of a ring have them.
    chosen.results = candidate.declares().results == ResultForm::rounded
                         ? problem.dtype
                         : partial_dtype(problem.dtype);
  }
  try {
    (void)state(chosen.results, 1);  // recordings may not allocate
    chosen.kernel->prepare(block_, state(chosen.results, 0));
  } catch (const UnsupportedError& refusal) {
    return refusal.what();
  }
  chosen.call.emplace(device_, *stream_, [this, &chosen](int i) {
    chosen.kernel->forward(block_, state(chosen.results, i % 2), {*stream_, nullptr, threads_});
  });
  return {};
}

void KernelBlocks::compute(const Implementation& candidate, int calls) {
  candidates_.at(&candidate).call.value().run(calls);
}

SoftmaxState KernelBlocks::state(DType dtype, int which) {
  const AttentionShape& s = setup_.problem.shape;
  Tensor& output = outputs_[{dtype, which}];
  if (output.shape().rank() == 0) {
    output = Tensor(dtype, {s.batch, s.query_length, s.heads, s.value_dim}, device_.memory());
  }
  Tensor& lse = lse_.at(static_cast<std::size_t>(which));
  if (lse.shape().rank() == 0) {
    lse = Tensor(DType::float32, {s.batch, s.heads, s.query_length}, device_.memory());
  }
  return {output.view().slice(1, 0, extent_.rows), lse.view().slice(2, 0, extent_.rows)};
}

}  // namespace annulus::launcher
